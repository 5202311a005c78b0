"""Random requests scattered over pages, and their attention by nested loops in float64."""

import torch

from sglang_ascend.ops import attention
from sglang_ascend.ops.dispatch import REFERENCE

# float32: a score of 64 products errs by about 1e-6, and so does a weight.
# bf16: each weight is rounded by 2^-9 of its size, which the values (at most 4) carry into the
# result, and the result is rounded once more. fp16 has three bits more.
TOLERANCES = {
    torch.float32: {"atol": 1e-5, "rtol": 0.0},
    torch.bfloat16: {"atol": 4 * 2.0**-9, "rtol": 2.0**-8},
    torch.float16: {"atol": 4 * 2.0**-12, "rtol": 2.0**-11},
}
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


def scatter(per_request, page_size, generator, poison):
    """Lays requests over shuffled pages: (list of caches' rows) -> cache, block table."""
    lengths = [len(rows) for rows in per_request]
    blocks = [-(-length // page_size) for length in lengths]
    num_pages = sum(blocks) + 3
    cache = torch.full((num_pages * page_size, *per_request[0].shape[1:]), poison)
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

    def __init__(self, shape, query_lens, kv_lens, page_size, dtype, mla=False, poison=POISON):
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
        seed = torch.Generator().manual_seed
        self.key_cache, self.table = scatter(self.keys, page_size, seed(1), poison)
        if mla:
            self.values = [rows[..., : self.rank] for rows in self.keys]
            return
        self.values = [draw(length, num_kv_heads, dim) for length in kv_lens]
        # The same seed: one block table serves keys and values.
        self.value_cache, _ = scatter(self.values, page_size, seed(1), poison)

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

    def gqa_ragged(self, name=REFERENCE):
        return attention.paged_gqa_ragged.implementation(name)(
            self.query,
            self.key_cache,
            self.value_cache,
            self.table,
            self.kv_lens,
            query_lens=self.query_lens,
            page_size=self.page_size,
            scale=self.scale,
        )

    def latent_operands(self, query, apart):
        """Query and cache, and the keywords where the rope parts of both lie apart."""
        query = self.query if query is None else query
        if not apart:
            return (query, self.key_cache), {}
        halves = (whole.tensor_split([self.rank], dim=-1) for whole in (query, self.key_cache))
        (query, query_rope), (latent, rope) = ([half.contiguous() for half in of] for of in halves)
        return (query, latent), {"rope_cache": rope, "query_rope": query_rope}

    def mla(self, query=None, name=None, table=None, apart=False, query_apart=False):
        """By one implementation, or as the operator chooses."""
        operands, keywords = self.latent_operands(query, apart)
        if query_apart:
            query, rope = operands[0].tensor_split([self.rank], dim=-1)
            operands, keywords = (query, operands[1]), {"query_rope": rope}
        body = attention.paged_mla
        if name is not None:
            body = body.implementation(name)
        return body(
            *operands,
            self.table if table is None else table,
            torch.tensor(self.kv_lens),
            query_len=self.query_lens[0],
            page_size=self.page_size,
            scale=self.scale,
            kv_lora_rank=self.rank,
            **keywords,
        )

    def mla_ragged(self, name=REFERENCE, apart=False):
        operands, keywords = self.latent_operands(None, apart)
        return attention.paged_mla_ragged.implementation(name)(
            *operands,
            self.table,
            self.kv_lens,
            query_lens=self.query_lens,
            page_size=self.page_size,
            scale=self.scale,
            kv_lora_rank=self.rank,
            **keywords,
        )


def uniform_batch(
    shape, query_len, page_size, dtype, mla=False, lengths=(1, 16, 17, 129), poison=POISON
):
    kv_lens = [max(query_len, length) for length in lengths]
    return Batch(shape, [query_len] * len(kv_lens), kv_lens, page_size, dtype, mla, poison)


def agrees(output, expected):
    return torch.allclose(output.double(), expected, **TOLERANCES[output.dtype])
