"""Top-k, top-p and the joint filters on CPU by Numba: sorts nothing, and looks for the threshold
only where the maxima of groups of logits leave room for it."""

from __future__ import annotations

import torch

from sglang_ascend.ops.sampling.threshold import GROUP_SIZE, Kept

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def accepts(logits: torch.Tensor, *tensors: object, joint: bool = False) -> bool:
    return logits.dtype in DTYPES


def top_k_top_p(
    logits: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, joint: bool = False
) -> Kept:
    from sglang_ascend.ops.sampling import numba_kernels

    num_rows, vocab_size = logits.shape
    threshold, largest, mass = torch.empty(3, num_rows).unbind()
    group_max = torch.empty(num_rows, -(-vocab_size // GROUP_SIZE))
    numba_kernels.filter_rows(
        logits.float().contiguous().numpy(),
        top_ks.long().numpy(),
        top_ps.float().numpy(),
        joint,
        GROUP_SIZE,
        threshold.numpy(),
        largest.numpy(),
        mass.numpy(),
        group_max.numpy(),
    )
    return Kept(threshold, largest, mass, group_max).checked_on_host()


def accepts_filters(logits: torch.Tensor, *filters: torch.Tensor) -> bool:
    return logits.dtype == torch.float32


def filter_probs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """``reference.filter_probs``; raises ValueError as ``top_k_top_p`` does."""
    from sglang_ascend.ops.sampling import numba_kernels

    logits = (logits / temperatures).contiguous()
    cut = top_k_top_p(logits, top_ks, top_ps, joint=True)
    probs = torch.zeros_like(logits)
    numba_kernels.weigh_rows(
        logits.numpy(),
        cut.threshold.numpy(),
        cut.max.numpy(),
        top_ks.long().numpy(),
        top_ps.float().numpy(),
        min_ps.float().numpy(),
        GROUP_SIZE,
        cut.group_max.numpy(),
        probs.numpy(),
    )
    return probs
