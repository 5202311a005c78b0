"""Paged attention: every row is the softmax over exactly the keys that came before it.

The oracle is nested loops in float64 over each request's own keys; the op sees the same keys
scattered over shuffled pages of a pool whose other slots are poisoned.
"""

import math

import pytest
import torch

from sglang_ascend.ops import attention
from sglang_ascend.ops.attention import reference
from sglang_ascend.ops.dispatch import REFERENCE

# float32: a score of 64 products errs by about 1e-6, and so does a weight.
# bf16: each weight is rounded by 2^-9 of its size, which the values (at most 4) carry into the
# result, and the result is rounded once more.
TOLERANCES = {
    torch.float32: {"atol": 1e-5, "rtol": 0.0},
    torch.bfloat16: {"atol": 4 * 2.0**-9, "rtol": 2.0**-8},
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16"])
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 16, 128])
QUERY_LENS = pytest.mark.parametrize("query_len", [1, 2, 4, 16])
GQA_NAMES = pytest.mark.parametrize("name", list(attention.paged_gqa._implementations))
# The compiled body declines bf16: through the operator the reference serves it.
GQA_BODIES = pytest.mark.parametrize(
    ("name", "dtype"),
    [(REFERENCE, torch.float32), (REFERENCE, torch.bfloat16), ("numba", torch.float32)],
    ids=["reference-fp32", "reference-bf16", "numba-fp32"],
)
# heads, key heads, dim: groups of 1, 3 and 8 heads.
GQA_SHAPES = pytest.mark.parametrize("shape", [(4, 4, 16), (9, 3, 64), (8, 1, 32)], ids=str)
# heads, latent rank, rope dim; no two equal, so that none can be taken for another.
MLA_SHAPES = pytest.mark.parametrize("shape", [(6, 80, 32), (3, 16, 8)], ids=str)
# Finite, as masked keys must be, and ruinous if one of them had any weight.
POISON = 1e30


def attend_by_loops(queries, keys, values, query_lens, scale, ahead=0):
    """One request after another, one head, one query: float64 [rows, heads, value_dim].

    ``ahead`` breaks it: how many keys too many (or too few) each query sees.
    """
    rows = []
    for query, key, value in zip(queries, keys, values, strict=True):
        query, key, value = query.double(), key.double(), value.double()
        query_len, num_heads, _ = query.shape
        kv_len, num_kv_heads, _ = key.shape
        for i in range(query_len):
            num_visible = min(kv_len - query_len + i + 1 + ahead, kv_len)
            for head in range(num_heads):
                kv_head = head * num_kv_heads // num_heads
                scores = scale * (key[:num_visible, kv_head] @ query[i, head])
                weights = (scores - scores.max()).exp()
                rows.append((weights / weights.sum()) @ value[:num_visible, kv_head])
    return torch.stack(rows).view(sum(query_lens), queries[0].shape[1], -1)


def scatter(per_request, page_size, generator):
    """Lays requests over shuffled pages: (list of caches' rows) -> cache, block table."""
    lengths = [len(rows) for rows in per_request]
    blocks = [-(-length // page_size) for length in lengths]
    num_pages = sum(blocks) + 3
    cache = torch.full((num_pages * page_size, *per_request[0].shape[1:]), POISON)
    cache = cache.to(per_request[0].dtype)
    free = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.full((len(lengths), max(blocks)), free.pop())
    for i, rows in enumerate(per_request):
        for block in range(blocks[i]):
            table[i, block] = page = free.pop()
            piece = rows[block * page_size : (block + 1) * page_size]
            cache[page * page_size : page * page_size + len(piece)] = piece
    return cache, table


class Batch:
    """Random requests: their own rows for the oracle, pages and tables for the op."""

    def __init__(self, shape, query_lens, kv_lens, page_size, dtype, mla=False):
        generator = torch.Generator().manual_seed(sum(kv_lens) + page_size)

        def draw(*size):
            return torch.randn(size, generator=generator).to(dtype)

        if mla:
            num_heads, self.rank, rope_dim = shape
            num_kv_heads, dim = 1, self.rank + rope_dim
        else:
            num_heads, num_kv_heads, dim = shape
        self.query_lens, self.kv_lens, self.page_size = query_lens, kv_lens, page_size
        self.scale = dim**-0.5
        self.queries = [draw(length, num_heads, dim) for length in query_lens]
        self.keys = [draw(length, num_kv_heads, dim) for length in kv_lens]
        self.key_cache, self.table = scatter(self.keys, page_size, torch.Generator().manual_seed(1))
        if mla:
            self.values = [rows[..., : self.rank] for rows in self.keys]
            return
        self.values = [draw(length, num_kv_heads, dim) for length in kv_lens]
        # The same seed: one block table serves keys and values.
        self.value_cache, _ = scatter(self.values, page_size, torch.Generator().manual_seed(1))

    @property
    def query(self):
        return torch.cat(self.queries)

    def expected(self, ahead=0):
        return attend_by_loops(
            self.queries, self.keys, self.values, self.query_lens, self.scale, ahead
        )

    def gqa(self, name=None, table=None):
        """By one implementation, or as the operator chooses."""
        body = attention.paged_gqa
        if name is not None:
            body = body.implementation(name)
        return body(
            self.query,
            self.key_cache,
            self.value_cache,
            self.table if table is None else table,
            torch.tensor(self.kv_lens),
            query_len=self.query_lens[0],
            page_size=self.page_size,
            scale=self.scale,
        )

    def gqa_ragged(self):
        return attention.paged_gqa_ragged(
            self.query,
            self.key_cache,
            self.value_cache,
            self.table,
            self.kv_lens,
            query_lens=self.query_lens,
            page_size=self.page_size,
            scale=self.scale,
        )

    def mla(self, query=None):
        return attention.paged_mla(
            self.query if query is None else query,
            self.key_cache,
            self.table,
            torch.tensor(self.kv_lens),
            query_len=self.query_lens[0],
            page_size=self.page_size,
            scale=self.scale,
            kv_lora_rank=self.rank,
        )

    def mla_ragged(self):
        return attention.paged_mla_ragged(
            self.query,
            self.key_cache,
            self.table,
            self.kv_lens,
            query_lens=self.query_lens,
            page_size=self.page_size,
            scale=self.scale,
            kv_lora_rank=self.rank,
        )


def uniform_batch(shape, query_len, page_size, dtype, mla=False, lengths=(1, 16, 17, 129)):
    kv_lens = [max(query_len, length) for length in lengths]
    return Batch(shape, [query_len] * len(kv_lens), kv_lens, page_size, dtype, mla)


def agrees(output, expected):
    return torch.allclose(output.double(), expected, **TOLERANCES[output.dtype])


# Query and kv lengths of prefill: whole prompts, chunks over a cached prefix, single tokens.
PREFILL = {"query_lens": [1, 5, 3, 1, 16, 33], "kv_lens": [1, 5, 10, 40, 129, 33]}


@PAGE_SIZES
@QUERY_LENS
@GQA_SHAPES
@GQA_BODIES
def test_gqa_rows_are_the_softmax_over_the_keys_before_them(
    name, shape, query_len, page_size, dtype
):
    batch = uniform_batch(shape, query_len, page_size, dtype)
    assert agrees(batch.gqa(name), batch.expected())


@DTYPES
@PAGE_SIZES
@QUERY_LENS
@MLA_SHAPES
def test_mla_rows_are_the_softmax_over_the_latents_before_them(shape, query_len, page_size, dtype):
    batch = uniform_batch(shape, query_len, page_size, dtype, mla=True)
    assert agrees(batch.mla(), batch.expected())


@DTYPES
@PAGE_SIZES
@GQA_SHAPES
def test_gqa_prefill_attends_to_the_prefix_and_to_itself(shape, page_size, dtype):
    batch = Batch(shape, **PREFILL, page_size=page_size, dtype=dtype)
    assert agrees(batch.gqa_ragged(), batch.expected())


@DTYPES
@PAGE_SIZES
@MLA_SHAPES
def test_mla_prefill_attends_to_the_prefix_and_to_itself(shape, page_size, dtype):
    batch = Batch(shape, **PREFILL, page_size=page_size, dtype=dtype, mla=True)
    assert agrees(batch.mla_ragged(), batch.expected())


@PAGE_SIZES
@pytest.mark.parametrize("query_len", [1, 4])
def test_long_and_short_contexts_share_a_batch(query_len, page_size):
    lengths = (1500, 1, 700, 33, 1499, 1024)
    gqa = uniform_batch((9, 3, 64), query_len, page_size, torch.float32, lengths=lengths)
    mla = uniform_batch((6, 80, 32), query_len, page_size, torch.float32, True, lengths=lengths)
    for name in attention.paged_gqa._implementations:
        assert agrees(gqa.gqa(name), gqa.expected()), name
    assert agrees(mla.mla(), mla.expected())


def test_a_long_prompt_is_prefilled_in_chunks():
    batch = Batch((3, 1, 16), [300, 2], [1400, 1500], 16, torch.float32)
    assert agrees(batch.gqa_ragged(), batch.expected())


@pytest.mark.parametrize("batch_size", [1, 3, 4, 5, 8, 9, 33, 41])
def test_the_size_of_the_batch_does_not_matter(batch_size):
    """One bucket of lengths, several, uneven ones, more requests than eight buckets of four."""
    lengths = [4 + (i * 37) % 90 for i in range(batch_size)]
    gqa = uniform_batch((6, 2, 8), 4, 1, torch.float32, lengths=lengths)
    mla = uniform_batch((3, 16, 8), 4, 16, torch.float32, True, lengths=lengths)
    for name in attention.paged_gqa._implementations:
        assert agrees(gqa.gqa(name), gqa.expected()), name
    assert agrees(mla.mla(), mla.expected())


def test_one_long_context_does_not_pad_the_short_ones():
    """The vectorised batch is cut by length: the work is near the sum of lengths, not the max."""
    kv_lens = torch.tensor([1500] + [10] * 31)
    buckets = list(reference._length_buckets(kv_lens))
    assert len(buckets) <= reference.MAX_BUCKETS
    assert sorted(int(i) for requests, _ in buckets for i in requests) == list(range(32))
    padded = sum(len(requests) * longest for requests, longest in buckets)
    assert padded <= 4 * 1500 + 28 * 10 < 32 * 1500 / 7


def test_a_cache_in_another_dtype_is_read_at_full_precision():
    batch = uniform_batch((9, 3, 64), 4, 1, torch.bfloat16)
    batch.queries = [query.float() for query in batch.queries]
    assert agrees(batch.gqa(), batch.expected())


# Broken on purpose: what the comparisons above must catch.


@pytest.mark.parametrize("ahead", [1, -1])
@QUERY_LENS
def test_a_mask_off_by_one_would_be_seen(query_len, ahead, monkeypatch):
    honest = reference.visible_keys

    def off_by_one(kv_lens, query_len, max_kv_len):
        return honest(kv_lens + ahead, query_len, max_kv_len)

    monkeypatch.setattr(reference, "visible_keys", off_by_one)
    lengths = (2, 16, 17, 63, 129)
    gqa = uniform_batch((9, 3, 64), query_len, 1, torch.bfloat16, lengths=lengths)
    mla = uniform_batch((6, 80, 32), query_len, 1, torch.bfloat16, True, lengths=lengths)
    assert not agrees(gqa.gqa(), gqa.expected())
    assert not agrees(mla.mla(), mla.expected())


@GQA_NAMES
@QUERY_LENS
def test_a_key_too_few_would_be_seen(query_len, name):
    batch = uniform_batch((9, 3, 64), query_len, 1, torch.float32, lengths=(17, 40, 129))
    assert agrees(batch.gqa(name), batch.expected())
    assert not agrees(batch.gqa(name), batch.expected(ahead=-1))


@pytest.mark.parametrize("ahead", [1, -1])
def test_a_prefill_mask_off_by_one_would_be_seen(ahead):
    prefill = {"query_lens": [5, 3, 16], "kv_lens": [9, 10, 129]}
    batch = Batch((9, 3, 64), **prefill, page_size=16, dtype=torch.bfloat16)
    assert not agrees(batch.gqa_ragged(), batch.expected(ahead))


def test_a_block_table_row_swapped_would_be_seen():
    batch = uniform_batch((9, 3, 64), 1, 16, torch.bfloat16, lengths=(40, 41, 42))
    assert agrees(batch.gqa(), batch.expected())
    assert not agrees(batch.gqa(table=batch.table[[1, 0, 2]]), batch.expected())


def test_verifying_k_rows_instead_of_k_plus_1_would_be_seen():
    batch = uniform_batch((9, 3, 64), 4, 1, torch.bfloat16)
    expected = batch.expected().view(-1, 4, 9, 64)[:, :3]
    batch.queries = [query[:3] for query in batch.queries]
    batch.query_lens = [3] * len(batch.queries)
    assert not agrees(batch.gqa(), expected.reshape(-1, 9, 64))


def test_the_rope_part_left_out_of_mla_would_be_seen():
    batch = uniform_batch((6, 80, 32), 4, 1, torch.bfloat16, mla=True)
    no_rope = batch.query.clone()
    no_rope[..., 80:] = 0
    assert agrees(batch.mla(), batch.expected())
    assert not agrees(batch.mla(no_rope), batch.expected())


def test_the_oracle_agrees_with_a_softmax_done_by_hand():
    """Two keys with scores 0 and ln 3: weights 1/4 and 3/4."""
    query = torch.tensor([[[1.0]]])
    key = torch.tensor([[[0.0]], [[math.log(3)]]])
    value = torch.tensor([[[8.0]], [[4.0]]])
    assert attend_by_loops([query], [key], [value], [1], 1.0).item() == pytest.approx(5.0)
