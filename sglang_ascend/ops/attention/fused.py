"""Attention of prefill by torch_npu's fused operator, which reads the pages where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch

RIGHT_ALIGNED_CAUSAL = 3
COMPRESSED_MASK = 2048
PAGE_SIZES = frozenset({128, 256, 384, 512})
# What requests of several lengths may stand one behind another with (TND), in bfloat16 alone.
# torch_npu asks for pages of at least 128 tokens; newer documents of CANN, for TND, of at most 128.
TND_DIMS, TND_PAGE_SIZE = frozenset({128, 192}), 128
MAX_TND_REQUESTS, MAX_TND_ROWS = 4096, 1 << 20
MAX_HEADS, MAX_GROUP, MAX_DIM, MAX_WIDTH = 256, 64, 512, 65534


@cache
def causal_mask(device: torch.device) -> torch.Tensor:
    """The one mask of sparse modes 2 to 4, whatever the lengths: True hides."""
    size = (COMPRESSED_MASK, COMPRESSED_MASK)
    return torch.ones(size, dtype=torch.bool, device=device).triu(1)


def paged_gqa_ragged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: Sequence[int],
    *,
    query_lens: Sequence[int],
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """``reference.paged_gqa_ragged`` of what ``accepts_gqa_ragged``; does not synchronise.

    One launch where rows of several requests may stand one behind another, else one a request.
    """
    table = block_table.int()
    if _are_tnd(query, query_lens, page_size):
        ends = list(accumulate(query_lens))
        return _attend(query, key_cache, value_cache, table, ends, kv_lens, page_size, scale, "TND")
    output = torch.empty_like(query)
    start = 0
    for request, (num_rows, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
        if num_rows:
            rows = slice(start, start + num_rows)
            of_request = (table[request : request + 1], [num_rows], [kv_len], page_size, scale)
            output[rows] = _attend(
                query[None, rows], key_cache, value_cache, *of_request, layout="BSND"
            )[0]
        start += num_rows
    return output


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    page_size: int,
    scale: float,
    layout: str,
) -> torch.Tensor:
    """``query_lens`` are running sums in TND; ``kv_lens`` of paged keys are each request's own."""
    num_kv_heads = key_cache.shape[1]
    attended, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
        query,
        key_cache.view(-1, page_size, num_kv_heads * key_cache.shape[2]),
        value_cache.view(-1, page_size, num_kv_heads * value_cache.shape[2]),
        atten_mask=causal_mask(query.device),
        actual_seq_qlen=query_lens,
        actual_seq_kvlen=kv_lens,
        block_table=block_table,
        num_query_heads=query.shape[-2],
        num_key_value_heads=num_kv_heads,
        softmax_scale=scale,
        input_layout=layout,
        sparse_mode=RIGHT_ALIGNED_CAUSAL,
        block_size=page_size,
    )
    return attended


def _are_tnd(query: torch.Tensor, query_lens: Sequence[int], page_size: int) -> bool:
    return (
        query.dtype == torch.bfloat16
        and query.shape[2] in TND_DIMS
        and page_size == TND_PAGE_SIZE
        and len(query) <= MAX_TND_ROWS
        and len(query_lens) <= MAX_TND_REQUESTS
    )


def accepts_gqa_ragged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: Sequence[int],
    *,
    query_lens: Sequence[int],
    page_size: int,
    scale: float,
) -> bool:
    """Contiguous tensors of one 16-bit dtype, pages of 128 tokens or up to 4 times as many."""
    _, num_heads, dim = query.shape
    num_kv_heads = key_cache.shape[1]
    tensors = (query, key_cache, value_cache)
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and all(tensor.dtype == query.dtype and tensor.is_contiguous() for tensor in tensors)
        and key_cache.shape == value_cache.shape
        and page_size in PAGE_SIZES
        and dim % 16 == 0
        and dim <= MAX_DIM
        and num_heads <= MAX_HEADS
        and num_heads // num_kv_heads <= MAX_GROUP
        and num_heads * dim <= MAX_WIDTH
    )
