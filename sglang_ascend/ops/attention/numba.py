"""Grouped-query attention on CPU, compiled by Numba: the pages are read where they lie.

Gathering the keys of a batch first, as PyTorch must, writes and reads them once more. Compiled code
is kept on disk.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from sglang_ascend.ops.numba_floats import FAST, FLOATS, array_at, exp, narrow, widen


def accepts(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    **sizes: object,
) -> bool:
    """float32 or bfloat16 throughout; caches whose pages lie one behind another."""
    return (
        query.dtype in FLOATS
        and key_cache.dtype == value_cache.dtype == query.dtype
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and block_table.stride(1) == 1
        and kv_lens.is_contiguous()
        and block_table.dtype == kv_lens.dtype == torch.int64
    )


def paged_gqa(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    query_len: int,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """``reference.paged_gqa`` of what ``accepts``; weights and sums stay float32."""
    query = query.contiguous()
    num_slots, num_kv_heads, value_dim = value_cache.shape
    output = query.new_empty(*query.shape[:-1], value_dim)
    _attend(
        (query.data_ptr(), *query.shape),
        (key_cache.data_ptr(), value_cache.data_ptr(), num_slots, num_kv_heads, value_dim),
        (block_table.data_ptr(), len(kv_lens), block_table.stride(0)),
        kv_lens.data_ptr(),
        output.data_ptr(),
        query_len,
        page_size,
        scale,
        FLOATS[query.dtype],
    )
    return output


@numba.njit(cache=True, fastmath=FAST, nogil=True, error_model="numpy")
def _attend(query, caches, block_table, kv_lens, output, query_len, page_size, scale, element):
    """Shapes as in ``reference.paged_gqa``, behind the addresses; writes ``output``.

    The query rows and heads that share a key are rows of one product: each key and value is read,
    and widened, once for all of them.
    """
    query, num_query_rows, num_heads, dim = query
    key_cache, value_cache, num_slots, num_kv_heads, value_dim = caches
    block_table, batch_size, row_stride = block_table
    query = array_at(query, (num_query_rows, num_heads, dim), element)
    output = array_at(output, (num_query_rows, num_heads, value_dim), element)
    key_cache = array_at(key_cache, (num_slots, num_kv_heads, dim), element)
    value_cache = array_at(value_cache, (num_slots, num_kv_heads, value_dim), element)
    block_table = array_at(block_table, (batch_size, row_stride), np.int64(0))
    kv_lens = array_at(kv_lens, (batch_size,), np.int64(0))
    scale = np.float32(scale)
    group = num_heads // num_kv_heads
    num_rows = query_len * group
    scaled = np.empty((num_kv_heads, num_rows, dim), np.float32)
    weights = np.empty((num_kv_heads, num_rows, kv_lens.max()), np.float32)
    attended = np.empty((num_kv_heads, num_rows, value_dim), np.float32)
    key, value = np.empty(dim, np.float32), np.empty(value_dim, np.float32)
    for b in range(len(kv_lens)):
        prefix_len = kv_lens[b] - query_len
        for h in range(num_kv_heads):
            for row in range(num_rows):
                i, g = row // group, row % group
                for d in range(dim):
                    scaled[h, row, d] = widen(query[b * query_len + i, h * group + g, d]) * scale
        for j in range(kv_lens[b]):
            slot = block_table[b, j // page_size] * page_size + j % page_size
            first_row = max(0, j - prefix_len) * group  # the first that sees key j
            for h in range(num_kv_heads):
                for d in range(dim):
                    key[d] = widen(key_cache[slot, h, d])
                for row in range(first_row, num_rows):
                    total = np.float32(0.0)
                    for d in range(dim):
                        total += scaled[h, row, d] * key[d]
                    weights[h, row, j] = total
        for h in range(num_kv_heads):
            for row in range(num_rows):
                softmax(weights[h, row, : prefix_len + row // group + 1])
        attended[:] = 0
        for j in range(kv_lens[b]):
            slot = block_table[b, j // page_size] * page_size + j % page_size
            first_row = max(0, j - prefix_len) * group
            for h in range(num_kv_heads):
                for d in range(value_dim):
                    value[d] = widen(value_cache[slot, h, d])
                for row in range(first_row, num_rows):
                    weight = weights[h, row, j]
                    for d in range(value_dim):
                        attended[h, row, d] += weight * value[d]
        for h in range(num_kv_heads):
            for row in range(num_rows):
                i, g = row // group, row % group
                for d in range(value_dim):
                    value_of_row = narrow(attended[h, row, d], element)
                    output[b * query_len + i, h * group + g, d] = value_of_row


@numba.njit(cache=True, fastmath=FAST, nogil=True, error_model="numpy")
def softmax(scores):
    """In place, of one row."""
    highest = np.float32(-np.inf)
    for j in range(len(scores)):
        highest = max(highest, scores[j])
    total = np.float32(0.0)
    for j in range(len(scores)):
        weight = exp(scores[j] - highest)
        scores[j] = weight
        total += weight
    for j in range(len(scores)):
        scores[j] /= total
