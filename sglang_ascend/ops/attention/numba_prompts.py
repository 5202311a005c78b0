"""Attention of prompts on CPU: of a short one ``numba``'s, of a longer one PyTorch's.

PyTorch copies a request's keys and values together and multiplies in blocks, which are faster, but
take longer to begin with than a short prompt's whole attention. Which of the two a request gets
does not depend on those beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_ascend.ops.attention import numba
from sglang_ascend.ops.attention import torch as blocks
from sglang_ascend.ops.attention.reference import whole

# Multiplications of queries by keys, of one request, up to which ``numba``'s is faster.
MOST_PRODUCTS = 1 << 22


def accepts(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: Sequence[int],
    **sizes: Any,
) -> bool:
    lens = torch.tensor(kv_lens)
    return numba.accepts(query, key_cache, value_cache, block_table, lens, **sizes)


def accepts_latent(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: Sequence[int],
    **sizes: Any,
) -> bool:
    lens = torch.tensor(kv_lens)
    return numba.accepts_latent(query, latent_cache, block_table, lens, **sizes)


def paged_gqa_ragged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *of_requests: Any,
    **sizes: Any,
) -> torch.Tensor:
    caches = key_cache, value_cache
    bodies = numba.paged_gqa, blocks.paged_gqa_ragged
    return _request_by_request(*bodies, query, caches, *of_requests, **sizes)


def paged_mla_ragged(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    *of_requests: Any,
    rope_cache: None = None,
    query_rope: torch.Tensor | None = None,
    **sizes: Any,
) -> torch.Tensor:
    query, bodies = whole(query, query_rope), (numba.paged_mla, blocks.paged_mla_ragged)
    return _request_by_request(*bodies, query, (latent_cache,), *of_requests, **sizes)


def _request_by_request(
    of_short: Callable[..., torch.Tensor],
    of_long: Callable[..., torch.Tensor],
    query: torch.Tensor,
    caches: tuple[torch.Tensor, ...],
    block_table: torch.Tensor,
    kv_lens: Sequence[int],
    *,
    query_lens: Sequence[int],
    **sizes: Any,
) -> torch.Tensor:
    output = []
    for i, (queries, kv_len) in enumerate(zip(query.split([*query_lens]), kv_lens, strict=True)):
        query_len, pages = len(queries), block_table[i : i + 1]
        if queries.numel() * kv_len <= MOST_PRODUCTS:
            lens = torch.tensor([kv_len])
            attended = of_short(queries, *caches, pages, lens, query_len=query_len, **sizes)
        else:
            attended = of_long(queries, *caches, pages, [kv_len], query_lens=[query_len], **sizes)
        output.append(attended)
    return output[0] if len(output) == 1 else torch.cat(output)
