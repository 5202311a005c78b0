"""Attention of transformers' models as training and calibration run it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
ATTENTION = "grouped"  # the name under which transformers finds `grouped_attention`


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention in which the query heads that share a KV head are further rows of that head.

    transformers' own repeats the keys of each KV head instead, which costs a decode step of many
    rows several times its matrix products.

    Args:
        query: [batch, heads, rows, dim]; key, value: [batch, kv_heads, keys, dim].
        attention_mask: bool [batch or 1, 1, rows, keys]; the caller's, never transformers' own.

    Returns:
        [batch, rows, heads, value_dim], and no weights.
    """
    batch, heads, rows, dim = query.shape
    groups = heads // key.shape[1]
    mask = attention_mask.repeat(1, 1, groups, 1)
    folded = query.reshape(batch, key.shape[1], groups * rows, dim)
    out = F.scaled_dot_product_attention(folded, key, value, mask, scale=scaling)
    return out.reshape(batch, heads, rows, -1).transpose(1, 2), None
