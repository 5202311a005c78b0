"""Paged attention by PyTorch, for any device: requests of like length are gathered and attended at
once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_ascend.ops.attention.reference import whole

# Requests of like length are padded to one length and attended at once. Four are enough to pay
# for a call; eight buckets waste 1/16 of a spread of lengths where one would waste half.
MIN_BUCKET_SIZE = 4
MAX_BUCKETS = 8


def visible_keys(kv_lens: torch.Tensor, query_len: int, max_kv_len: int) -> torch.Tensor:
    """bool [batch, query_len, max_kv_len]: key j is seen by query i of the last query_len rows."""
    device = kv_lens.device
    last_seen = (kv_lens - query_len)[:, None] + torch.arange(query_len, device=device)
    return torch.arange(max_kv_len, device=device) <= last_seen[:, :, None]


def _length_buckets(kv_lens: torch.Tensor) -> Iterator[tuple[torch.Tensor | slice, int]]:
    """(requests, longest length) of at most MAX_BUCKETS groups of like length."""
    if len(kv_lens) <= MIN_BUCKET_SIZE:
        yield slice(None), int(kv_lens.max())
        return
    bucket_size = max(MIN_BUCKET_SIZE, -(-len(kv_lens) // MAX_BUCKETS))
    sorted_lens, order = kv_lens.sort()
    buckets = zip(order.split(bucket_size), sorted_lens.split(bucket_size), strict=True)
    for requests, lens in buckets:
        yield requests, int(lens[-1])


def _head_rows(
    block_table: torch.Tensor, page_size: int, num_kv_heads: int, max_kv_len: int
) -> torch.Tensor:
    """Where position j of key head h lies in a cache seen as [slots * kv_heads, dim].

    int64 [batch, kv_heads, max_kv_len]: gathering by it moves the heads in front for free.
    """
    slots = block_table[:, : -(-max_kv_len // page_size)].long()
    if page_size > 1:
        offsets = torch.arange(page_size, device=slots.device)
        slots = (slots[:, :, None] * page_size + offsets).flatten(1)[:, :max_kv_len]
    heads = torch.arange(num_kv_heads, device=slots.device)
    return slots[:, None] * num_kv_heads + heads[:, None]


def _gather_rows(cache: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[slots, kv_heads, dim] -> [batch, kv_heads, max_kv_len, dim]."""
    gathered = cache.view(-1, cache.shape[-1]).index_select(0, rows.reshape(-1))
    return gathered.view(*rows.shape, -1).to(dtype)


def _gather_latent(
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor | None,
    rows: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """c and r beside each other: [batch, 1, max_kv_len, kv_lora_rank + rope_dim]."""
    latent = _gather_rows(latent_cache, rows, dtype)
    if rope_cache is None:
        return latent
    return torch.cat([latent, _gather_rows(rope_cache, rows, dtype)], dim=-1)


def _attend_bucket(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """query [batch, query_len, heads, dim] over keys, values [batch, kv_heads, kv_len, dim].

    The heads of one group are folded into rows, so that their keys are read once.
    """
    batch_size, query_len, _, dim = query.shape
    num_kv_heads, max_kv_len = keys.shape[1:3]
    grouped = query.view(batch_size, query_len, num_kv_heads, -1, dim).transpose(1, 2)
    mask = visible_keys(kv_lens, query_len, max_kv_len).repeat_interleave(grouped.shape[3], dim=1)
    output = scaled_dot_product_attention(
        grouped.reshape(batch_size, num_kv_heads, -1, dim),
        keys,
        values,
        attn_mask=mask[:, None],
        scale=scale,
    )
    return output.view(grouped.shape).transpose(1, 2).reshape(query.shape)


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
    """``reference.paged_gqa``; reads kv_lens on the host."""
    query_of = query.view(len(kv_lens), query_len, *query.shape[1:])
    output = torch.empty_like(query_of)
    for requests, max_kv_len in _length_buckets(kv_lens):
        rows = _head_rows(block_table[requests], page_size, key_cache.shape[1], max_kv_len)
        output[requests] = _attend_bucket(
            query_of[requests],
            _gather_rows(key_cache, rows, query.dtype),
            _gather_rows(value_cache, rows, query.dtype),
            kv_lens[requests],
            scale,
        )
    return output.view(query.shape)


def paged_mla(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    query_len: int,
    page_size: int,
    scale: float,
    kv_lora_rank: int,
    rope_cache: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """``reference.paged_mla``; reads kv_lens on the host."""
    query = whole(query, query_rope)
    query_of = query.view(len(kv_lens), query_len, *query.shape[1:])
    output = query_of.new_empty(*query_of.shape[:3], kv_lora_rank)
    for requests, max_kv_len in _length_buckets(kv_lens):
        rows = _head_rows(block_table[requests], page_size, 1, max_kv_len)
        latent = _gather_latent(latent_cache, rope_cache, rows, query.dtype)
        # The rope part rides along as value columns and is cut off: equal key and value widths
        # keep the fused CPU kernel, and the stream is gathered once.
        attended = _attend_bucket(query_of[requests], latent, latent, kv_lens[requests], scale)
        output[requests] = attended[..., :kv_lora_rank]
    return output.view(len(query), -1, kv_lora_rank)


def _attend_request(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """One request: query [query_len, heads, dim] over keys, values [1, kv_heads, kv_len, dim]."""
    query_len, num_heads, _ = query.shape
    _, num_kv_heads, kv_len, _ = keys.shape
    mask = None
    if 1 < query_len < kv_len:
        mask = torch.ones(query_len, kv_len, dtype=torch.bool, device=query.device)
        mask = mask.tril(kv_len - query_len)
    output = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.repeat_interleave(num_heads // num_kv_heads, dim=1),
        values.repeat_interleave(num_heads // num_kv_heads, dim=1),
        attn_mask=mask,
        is_causal=query_len == kv_len,
        scale=scale,
    )
    return output[0].transpose(0, 1)


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
    output = []
    for i, queries in enumerate(query.split(list(query_lens))):
        rows = _head_rows(block_table[i : i + 1], page_size, key_cache.shape[1], kv_lens[i])
        keys = _gather_rows(key_cache, rows, query.dtype)
        values = _gather_rows(value_cache, rows, query.dtype)
        output.append(_attend_request(queries, keys, values, scale))
    return torch.cat(output)


def paged_mla_ragged(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: Sequence[int],
    *,
    query_lens: Sequence[int],
    page_size: int,
    scale: float,
    kv_lora_rank: int,
    rope_cache: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    output = []
    for i, queries in enumerate(whole(query, query_rope).split(list(query_lens))):
        rows = _head_rows(block_table[i : i + 1], page_size, 1, kv_lens[i])
        latent = _gather_latent(latent_cache, rope_cache, rows, query.dtype)
        output.append(_attend_request(queries, latent, latent, scale)[..., :kv_lora_rank])
    return torch.cat(output)
