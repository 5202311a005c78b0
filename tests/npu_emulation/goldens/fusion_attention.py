"""The attention that torch_npu calls for torch's scaled_dot_product_attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from npu_emulation.goldens.attention import NO_BAND, attend, hidden
from npu_emulation.goldens.registry import UnsupportedArgumentError, golden

DEFAULT_MASK, ALL_MASK = 0, 1


@golden("npu::npu_fusion_attention_v3")
def fusion_attention_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    pre_tockens: int = NO_BAND,
    next_tockens: int = NO_BAND,
    inner_precise: int = 0,
    sparse_mode: int = DEFAULT_MASK,
) -> tuple[Tensor, None, None, None, None, None]:
    """softmax(scale * q k^T, where atten_mask is False) v; without a mask every key counts.

    Only attention itself is defined: the other results are for a backward pass.
    """
    if input_layout != "BNSD" or query.shape[1] != head_num:
        raise UnsupportedArgumentError(
            f"npu_fusion_attention_v3 in {input_layout} is not emulated."
        )
    has_band = (pre_tockens, next_tockens) != (NO_BAND, NO_BAND)
    if atten_mask is not None and sparse_mode == DEFAULT_MASK and has_band:
        raise UnsupportedArgumentError("npu_fusion_attention_v3 in a band is not emulated.")
    group = head_num // key.shape[1]
    results = []
    for request, (q, k, v) in enumerate(zip(query, key, value, strict=True)):
        k, v = (x.float().repeat_interleave(group, 0) for x in (k, v))
        scores = q.float() @ k.transpose(1, 2) * scale
        if atten_mask is not None and sparse_mode in (DEFAULT_MASK, ALL_MASK):
            masks = atten_mask[(None,) * (4 - atten_mask.dim())].expand(len(query), -1, -1, -1)
            scores = scores.masked_fill(masks[request].bool(), -math.inf)
        elif atten_mask is not None:
            masked = hidden(sparse_mode, atten_mask, request, *scores.shape[1:])
            scores = scores.masked_fill(masked, -math.inf)
        rows, _ = attend(scores, v.transpose(0, 1))
        results.append(rows.transpose(0, 1).to(query.dtype))
    return torch.stack(results), None, None, None, None, None
