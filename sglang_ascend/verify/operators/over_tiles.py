"""Attention whose every program meets its query with several tiles of keys.

A compiler that gives away the memory of a product's left operand says nothing: the first tile is
right, and later ones meet something else. Reported for `tl.dot` of triton-ascend 3.2.x.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ascend.verify.operators.calls import paged_gqa, paged_mla
from sglang_ascend.verify.operators.operator_call import Arguments, OperatorCall

# A tile has 128 keys at most. So many requests occupy 20 cores without splits; 132 cores take
# smaller tiles.
KV_LENS = torch.linspace(257, 511, 24).long()
# Of the scores: few keys then decide each row, so that a wrong query shows in the first digit.
SHARPNESS = 2.0


def sharp(arguments: Arguments) -> Arguments:
    args, kwargs = arguments
    return args, kwargs | {"scale": SHARPNESS * kwargs["scale"]}


def gqa_in_float64(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    query_len: int,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """As the operator's reference, in no tiles and in float64, rounded once."""
    output = []
    for rows, pages, kv_len in zip(query.split(query_len), block_table, kv_lens, strict=True):
        seen = torch.arange(int(kv_len))
        slots = pages[seen // page_size] * page_size + seen % page_size
        group = query.shape[1] // keys.shape[1]
        key, value = (of[slots].double().repeat_interleave(group, 1) for of in (keys, values))
        scores = scale * torch.einsum("qhd,khd->hqk", rows.double(), key)
        last_seen = int(kv_len) - query_len + torch.arange(query_len)
        scores[:, seen[None, :] > last_seen[:, None]] = -torch.inf
        output.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
    return torch.cat(output).to(query.dtype)


def mla_in_float64(
    query: torch.Tensor,
    latent: torch.Tensor,
    *places: torch.Tensor,
    query_rope: torch.Tensor,
    rope_cache: torch.Tensor,
    kv_lora_rank: int,
    **sizes: Any,
) -> torch.Tensor:
    assert latent.shape[-1] == kv_lora_rank
    whole_query, keys = torch.cat([query, query_rope], -1), torch.cat([latent, rope_cache], -1)
    return gqa_in_float64(whole_query, keys, latent, *places, **sizes)


# By operator; the roundings are those of CALLS.
OVER_TILES = {
    "attention.paged_gqa": OperatorCall(
        lambda dtype: sharp(paged_gqa(dtype, KV_LENS)), roundings=2, oracle=gqa_in_float64
    ),
    "attention.paged_mla": OperatorCall(
        lambda dtype: sharp(paged_mla(dtype, KV_LENS)), roundings=2, oracle=mla_in_float64
    ),
}
