"""fp32 grouped-query attention on CPU, compiled by Numba: the pages are read where they lie.

Gathering the keys of a batch first, as PyTorch must, writes and reads them once more.
"""

from __future__ import annotations

import torch


def accepts(query: torch.Tensor, *caches_and_indices: torch.Tensor, **sizes: object) -> bool:
    """fp32 caches whose pages lie one behind another."""
    caches = caches_and_indices[:2]
    return all(cache.dtype == torch.float32 and cache.is_contiguous() for cache in caches)


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
    """``reference.paged_gqa`` of what ``accepts``."""
    from sglang_ascend.ops.attention import kernels

    batch_size, num_heads, num_kv_heads = len(kv_lens), query.shape[1], key_cache.shape[1]
    max_kv_len = int(kv_lens.max())
    # The heads of a group share their keys: they and the query rows are rows of one product.
    grouped = query.float().view(batch_size, query_len, num_kv_heads, -1, query.shape[2])
    grouped = (grouped * scale).transpose(1, 2).contiguous()
    shape = (batch_size, num_kv_heads, query_len, num_heads // num_kv_heads, max_kv_len)
    weights = torch.empty(shape)
    table, lens, keys, values = (
        tensor.numpy() for tensor in (block_table, kv_lens, key_cache, value_cache)
    )
    kernels.scores(grouped.numpy(), keys, table, lens, page_size, weights.numpy())
    torch.softmax(weights, dim=-1, out=weights)
    output = torch.zeros(*grouped.shape[:-1], value_cache.shape[2])
    kernels.weighted_values(weights.numpy(), values, table, lens, page_size, output.numpy())
    return output.transpose(1, 2).reshape(query.shape).to(query.dtype)
