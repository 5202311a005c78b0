"""What torch_npu's fused attention is not documented for is declined: the reference serves it."""

from __future__ import annotations

import pytest
import torch

from sglang_ascend.ops.attention import fused


def accepted(
    heads: int = 16,
    kv_heads: int = 2,
    dim: int = 128,
    page_size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    value_dim: int | None = None,
    cache_dtype: torch.dtype | None = None,
) -> bool:
    def empty(*shape: int, of: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    keys = empty(9 * page_size, kv_heads, dim, of=cache_dtype or dtype)
    values = empty(9 * page_size, kv_heads, value_dim or dim, of=cache_dtype or dtype)
    table = empty(2, 3, of=torch.int64)
    lens = {"query_lens": [5, 9], "page_size": page_size, "scale": 1.0}
    return fused.accepts_gqa_ragged(
        empty(14, heads, dim, of=dtype), keys, values, table, [150, 9], **lens
    )


@pytest.mark.parametrize(
    "sizes", [{}, {"dim": 64}, {"dim": 256, "page_size": 512}, {"dtype": torch.float16}], ids=str
)
def test_documented_sizes_are_taken(sizes):
    assert accepted(**sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        {"dtype": torch.float32},
        {"cache_dtype": torch.int8},
        {"value_dim": 64},
        {"page_size": 1},
        {"page_size": 64},
        {"page_size": 640},
        {"dim": 72},
        {"dim": 576},
        {"heads": 264},
        {"heads": 256, "kv_heads": 8, "dim": 256},
        {"heads": 65, "kv_heads": 1},
    ],
    ids=str,
)
def test_other_sizes_are_declined(sizes):
    assert not accepted(**sizes)


def test_rows_with_gaps_are_declined():
    query = torch.empty(14, 16, 256, dtype=torch.bfloat16)[..., :128]
    cache = torch.empty(256, 2, 128, dtype=torch.bfloat16)
    lens = {"query_lens": [14], "page_size": 128, "scale": 1.0}
    table = torch.zeros(1, 2, dtype=torch.int64)
    assert fused.accepts_gqa_ragged(query.contiguous(), cache, cache, table, [14], **lens)
    assert not fused.accepts_gqa_ragged(query, cache, cache, table, [14], **lens)
