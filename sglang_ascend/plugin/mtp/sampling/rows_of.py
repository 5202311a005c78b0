"""What the rows of each request draw from."""

from __future__ import annotations

import copy

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_ascend.ops import sampling


def probabilities(logits: torch.Tensor, info: SamplingBatchInfo, width: int) -> torch.Tensor:
    """What each row's request draws from: [batch * width, vocab_size] -> the same shape."""
    rows = expand(info, width)
    if not filters(rows):
        return torch.softmax(logits / rows.temperatures, dim=-1)
    return sampling.filter_probs(logits, rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps)


def expand(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """Each request's parameters, once per row."""
    if width == 1:
        return info
    rows = copy.copy(info)
    for name in ("temperatures", "top_ks", "top_ps", "min_ps", "sampling_seed"):
        value = getattr(info, name)
        if value is not None:
            setattr(rows, name, value.repeat_interleave(width, dim=0))
    rows.sampling_mask_batch_indices = None
    return rows


def filters(info: SamplingBatchInfo) -> bool:
    return info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
