"""Definitions of paged attention. A request's last ``query_len`` tokens are the queries; query i
sees key positions j <= kv_len - query_len + i (right-aligned causal mask)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """One request, in float32: query [rows, heads, dim] over keys, values [kv_len, kv_heads, dim].

    Neighbouring query heads share a key head.
    """
    shared = query.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(shared, dim=1) for x in (keys, values))
    scores = scale * torch.einsum("qhd,khd->hqk", query.float(), keys)
    is_seen = torch.ones(len(query), len(keys), dtype=torch.bool, device=query.device)
    is_seen = is_seen.tril(len(keys) - len(query))
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def _gather(cache: torch.Tensor, pages: torch.Tensor, kv_len: int, page_size: int) -> torch.Tensor:
    """What lies in a request's pages, position after position: [kv_len, kv_heads, dim]."""
    positions = torch.arange(kv_len, device=cache.device)
    return cache[pages[positions // page_size].long() * page_size + positions % page_size]


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
    """Grouped-query attention of prefill: ``query_lens[i]`` rows of request i.

    A cached prefix makes kv_lens[i] longer than query_lens[i]. Lengths are host integers;
    otherwise as in ``paged_gqa``.
    """
    output = []
    requests = zip(query.split(list(query_lens)), block_table, kv_lens, strict=True)
    for queries, pages, kv_len in requests:
        keys, values = (
            _gather(cache, pages, kv_len, page_size) for cache in (key_cache, value_cache)
        )
        output.append(_attend(queries, keys, values, scale))
    return torch.cat(output)


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
    """Grouped-query attention of decode and verify: ``query_len`` rows per request.

    Args:
        query: [batch * query_len, heads, head_dim], request-major.
        key_cache, value_cache: [slots, kv_heads, head_dim]; the queries' own keys are in.
        block_table: int [batch, max_blocks], page ids; entries past kv_lens must name a readable
            page, since masked keys are multiplied by zero and must therefore be finite.
        kv_lens: int [batch], tokens of each request including the query rows.
        query_len: rows per request (1 in decode, K+1 in verify).
        page_size: slots per page; 1 makes block_table a table of slots.
        scale: multiplies the scores.

    Returns:
        [batch * query_len, heads, head_dim] in the dtype of ``query``. An implementation for a
        device must not synchronise; this one reads kv_lens on the host.
    """
    lens, query_lens = kv_lens.tolist(), [query_len] * len(kv_lens)
    sizes = {"page_size": page_size, "scale": scale}
    operands = query, key_cache, value_cache, block_table
    return paged_gqa_ragged(*operands, lens, query_lens=query_lens, **sizes)


def paged_mla_ragged(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: Sequence[int],
    *,
    kv_lora_rank: int,
    rope_cache: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    **sizes: Any,
) -> torch.Tensor:
    """Latent attention of prefill: lengths as in ``paged_gqa_ragged``, maths of ``paged_mla``."""
    if rope_cache is not None:
        latent_cache = torch.cat([latent_cache, rope_cache], dim=-1)
    caches = latent_cache, latent_cache[..., :kv_lora_rank]
    return paged_gqa_ragged(whole(query, query_rope), *caches, block_table, kv_lens, **sizes)


def whole(query: torch.Tensor, query_rope: torch.Tensor | None) -> torch.Tensor:
    """A latent query with its rope part behind it, where that is a tensor of its own."""
    return query if query_rope is None else torch.cat([query, query_rope], dim=-1)


def paged_mla(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    query_len: int,
    **sizes: Any,
) -> torch.Tensor:
    """Absorbed multi-head latent attention: one latent stream is both key and value.

    score = scale * (q_nope . c + q_rope . r), output = sum softmax(score) c
    (DeepSeek-V2, arXiv 2405.04434, section 2.1 with W_UK absorbed into the query).

    Args:
        query: [batch * query_len, heads, kv_lora_rank + rope_dim], absorbed nope part first; that
            part alone beside a query_rope.
        latent_cache: [slots, 1, kv_lora_rank + rope_dim], c then r; c alone beside a rope_cache.
        kv_lora_rank: int, width of c.
        rope_cache: [slots, 1, rope_dim], r, where it has a cache of its own.
        query_rope: [batch * query_len, heads, rope_dim], where it is a tensor of its own.
        The rest as in ``paged_gqa``.

    Returns:
        [batch * query_len, heads, kv_lora_rank], as in ``paged_gqa``.
    """
    query_lens = [query_len] * len(kv_lens)
    operands = query, latent_cache, block_table, kv_lens.tolist()
    return paged_mla_ragged(*operands, query_lens=query_lens, **sizes)
