"""The joint filters on devices with Triton: no sort, ``top_k_top_p`` says where they cut a row."""

from __future__ import annotations

import torch


def filter_probs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """``reference.filter_probs``; a mass within rounding of top_p may count as either.

    Raises ValueError as ``top_k_top_p`` does. Does not synchronise.
    """
    from sglang_ascend.ops.sampling import top_k_top_p

    logits = logits / temperatures
    cut = top_k_top_p(logits, top_ks, top_ps, joint=True)
    weights = (logits - cut.max[:, None]).exp()
    reaches = logits >= cut.threshold[:, None]
    lowest = torch.where(reaches, logits, torch.inf).amin(-1, keepdim=True)
    above, last = logits > lowest, logits == lowest
    # The cut goes through equal tokens: top_k has room for some of them, and a token stays while
    # the mass before it is at most top_p. The first one does.
    num_above = above.sum(-1, keepdim=True)
    left = top_ps[:, None] * weights.sum(-1, keepdim=True)
    left = left - torch.where(above, weights, 0.0).sum(-1, keepdim=True)
    fits = (left / (lowest - cut.max[:, None]).exp()).floor() + 1
    fits = torch.where(top_ps[:, None] >= 1, torch.inf, fits)
    room = torch.minimum(fits, top_ks[:, None] - num_above).clamp(min=1)
    kept = above | last & (last.cumsum(-1, dtype=torch.int32) <= room)
    weights = torch.where(kept & (weights >= min_ps[:, None]), weights, 0.0)
    return weights / weights.sum(-1, keepdim=True)
