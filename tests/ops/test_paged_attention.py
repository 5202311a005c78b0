"""Paged attention: every row is the softmax over exactly the keys that came before it.

The oracle is nested loops in float64 over each request's own keys; the op sees the same keys
scattered over shuffled pages of a pool whose other slots are poisoned.
"""

import copy
import math
import os
from pathlib import Path

import pytest
import torch
from begun import template
from paged_batch import Batch, agrees, attend_by_loops, uniform_batch
from processors import HASWELL

from sglang_ascend.ops.attention import torch as body
from sglang_ascend.ops.dispatch import REFERENCE

ROOT = Path(__file__).parents[2]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 16, 128])
QUERY_LENS = pytest.mark.parametrize("query_len", [1, 2, 4, 16])
# Triton's interpreter is slow: test_triton_attention.py has lengths that it can be asked for.
BY_TORCH = [REFERENCE, "torch"]
BODIES_ON_CPU = [*BY_TORCH, "numba"]
NAMES = pytest.mark.parametrize("name", BODIES_ON_CPU)
# heads, key heads, dim: groups of 1, 3 and 8 heads; dims of whole vectors, and not.
GQA_SHAPES = pytest.mark.parametrize(
    "shape", [(4, 4, 16), (9, 3, 64), (8, 1, 32), (6, 2, 72)], ids=str
)
# heads, latent rank, rope dim; no two equal, so that none can be taken for another.
MLA_SHAPES = pytest.mark.parametrize("shape", [(6, 80, 32), (3, 16, 8)], ids=str)

# Query and kv lengths of prefill: whole prompts, chunks over a cached prefix, single tokens.
PREFILL = {"query_lens": [1, 5, 3, 1, 16, 33], "kv_lens": [1, 5, 10, 40, 129, 33]}


@PAGE_SIZES
@QUERY_LENS
@GQA_SHAPES
@DTYPES
@NAMES
def test_gqa_rows_are_the_softmax_over_the_keys_before_them(
    name, shape, query_len, page_size, dtype
):
    batch = uniform_batch(shape, query_len, page_size, dtype)
    assert agrees(batch.gqa(name), batch.expected())


@NAMES
@DTYPES
@PAGE_SIZES
@QUERY_LENS
@MLA_SHAPES
def test_mla_rows_are_the_softmax_over_the_latents_before_them(
    name, shape, query_len, page_size, dtype
):
    batch = uniform_batch(shape, query_len, page_size, dtype, mla=True)
    assert agrees(batch.mla(name=name), batch.expected())


@NAMES
@DTYPES
@PAGE_SIZES
@GQA_SHAPES
def test_gqa_prefill_attends_to_the_prefix_and_to_itself(name, shape, page_size, dtype):
    batch = Batch(shape, **PREFILL, page_size=page_size, dtype=dtype)
    assert agrees(batch.gqa_ragged(name), batch.expected())


@NAMES
@DTYPES
@PAGE_SIZES
@MLA_SHAPES
def test_mla_prefill_attends_to_the_prefix_and_to_itself(name, shape, page_size, dtype):
    batch = Batch(shape, **PREFILL, page_size=page_size, dtype=dtype, mla=True)
    assert agrees(batch.mla_ragged(name), batch.expected())


@pytest.mark.parametrize("name", BY_TORCH)
@PAGE_SIZES
def test_the_rope_parts_may_be_tensors_of_their_own(name, page_size):
    decode = uniform_batch((6, 80, 32), 4, page_size, torch.float32, mla=True)
    assert agrees(decode.mla(name=name, apart=True), decode.expected())
    prefill = Batch((6, 80, 32), **PREFILL, page_size=page_size, dtype=torch.float32, mla=True)
    assert agrees(prefill.mla_ragged(name, apart=True), prefill.expected())


@NAMES
def test_the_querys_rope_part_alone_may_be_a_tensor_of_its_own(name):
    batch = uniform_batch((6, 80, 32), 4, 16, torch.float32, mla=True)
    assert agrees(batch.mla(name=name, query_apart=True), batch.expected())


@PAGE_SIZES
@pytest.mark.parametrize("query_len", [1, 4])
def test_long_and_short_contexts_share_a_batch(query_len, page_size):
    lengths = (1500, 1, 700, 33, 1499, 1024)
    gqa = uniform_batch((9, 3, 64), query_len, page_size, torch.float32, lengths=lengths)
    mla = uniform_batch((6, 80, 32), query_len, page_size, torch.float32, True, lengths=lengths)
    for name in BODIES_ON_CPU:
        assert agrees(gqa.gqa(name), gqa.expected()), name
    assert agrees(mla.mla(), mla.expected())


@NAMES
def test_a_long_prompt_is_prefilled_in_chunks(name):
    batch = Batch((3, 1, 16), [300, 2], [1400, 1500], 16, torch.float32)
    assert agrees(batch.gqa_ragged(name), batch.expected())


def test_a_prompt_has_the_same_bits_whatever_prompts_are_beside_it():
    """One that PyTorch attends to, and one that it does not."""
    batch = Batch((9, 3, 64), [130, 7], [130, 20], 1, torch.bfloat16)
    together = batch.gqa_ragged("numba")
    for i, rows in enumerate(together.split(batch.query_lens)):
        alone = copy.copy(batch)
        alone.queries, alone.table = batch.queries[i : i + 1], batch.table[i : i + 1]
        alone.query_lens, alone.kv_lens = batch.query_lens[i : i + 1], batch.kv_lens[i : i + 1]
        assert torch.equal(alone.gqa_ragged("numba"), rows)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 5, 8, 9, 33, 41])
def test_the_size_of_the_batch_does_not_matter(batch_size):
    """One bucket of lengths, several, uneven ones, more requests than eight buckets of four."""
    lengths = [4 + (i * 37) % 90 for i in range(batch_size)]
    gqa = uniform_batch((6, 2, 8), 4, 1, torch.float32, lengths=lengths)
    mla = uniform_batch((3, 16, 8), 4, 16, torch.float32, True, lengths=lengths)
    for name in BODIES_ON_CPU:
        assert agrees(gqa.gqa(name), gqa.expected()), name
    assert agrees(mla.mla(), mla.expected())


def test_one_long_context_does_not_pad_the_short_ones():
    """The vectorised batch is cut by length: the work is near the sum of lengths, not the max."""
    kv_lens = torch.tensor([1500] + [10] * 31)
    buckets = list(body._length_buckets(kv_lens))
    assert len(buckets) <= body.MAX_BUCKETS
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
    honest = body.visible_keys

    def off_by_one(kv_lens, query_len, max_kv_len):
        return honest(kv_lens + ahead, query_len, max_kv_len)

    monkeypatch.setattr(body, "visible_keys", off_by_one)
    lengths = (2, 16, 17, 63, 129)
    gqa = uniform_batch((9, 3, 64), query_len, 1, torch.bfloat16, lengths=lengths)
    mla = uniform_batch((6, 80, 32), query_len, 1, torch.bfloat16, True, lengths=lengths)
    assert not agrees(gqa.gqa("torch"), gqa.expected())
    assert not agrees(mla.mla(name="torch"), mla.expected())


@NAMES
@DTYPES
@QUERY_LENS
def test_a_key_too_few_would_be_seen(query_len, dtype, name):
    batch = uniform_batch((9, 3, 64), query_len, 1, dtype, lengths=(17, 40, 129))
    assert agrees(batch.gqa(name), batch.expected())
    assert not agrees(batch.gqa(name), batch.expected(ahead=-1))


@NAMES
@pytest.mark.parametrize("ahead", [1, -1])
def test_a_prefill_mask_off_by_one_would_be_seen(ahead, name):
    prefill = {"query_lens": [5, 3, 16], "kv_lens": [9, 10, 129]}
    batch = Batch((9, 3, 64), **prefill, page_size=16, dtype=torch.bfloat16)
    assert not agrees(batch.gqa_ragged(name), batch.expected(ahead))


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


def test_compiled_for_another_processor_it_is_the_same_attention(tmp_path):
    """Vectors and tiles are smaller without AVX-512."""
    program = (
        "import torch\n"
        "from paged_batch import agrees, uniform_batch\n"
        "from sglang_ascend.ops.numba_vectors import LANES\n"
        "assert LANES == 8, LANES\n"
        "for shape in (9, 3, 64), (8, 1, 40), (4, 4, 12):\n"
        "    for query_len in 1, 3, 4:\n"
        "        batch = uniform_batch(shape, query_len, 16, torch.bfloat16)\n"
        "        assert agrees(batch.gqa('numba'), batch.expected()), (shape, query_len)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    caches = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    done = template().run_text(program, [], {**os.environ, **HASWELL, **caches}, 300)
    assert done.returncode == 0, done.stderr
