"""Top-k, top-p, the joint filters and the seeded draw on CPU by Numba: sorts nothing, and looks for
the threshold only where the maxima of groups of logits leave room for it."""

from __future__ import annotations

import torch

from sglang_ascend.ops.sampling.threshold import GROUP_SIZE, Kept

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def accepts(logits: torch.Tensor, *tensors: object, joint: bool = False) -> bool:
    return logits.dtype in DTYPES


def top_k_top_p(
    logits: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, joint: bool = False
) -> Kept:
    from sglang_ascend.ops.sampling import kernels

    num_rows, vocab_size = logits.shape
    threshold, largest, mass = torch.empty(3, num_rows).unbind()
    group_max = torch.empty(num_rows, -(-vocab_size // GROUP_SIZE))
    kernels.filter_rows(
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
    from sglang_ascend.ops.sampling import kernels

    logits = (logits / temperatures).contiguous()
    cut = top_k_top_p(logits, top_ks, top_ps, joint=True)
    probs = torch.zeros_like(logits)
    kernels.weigh_rows(
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


def draw_kept(
    logits: torch.Tensor, kept: Kept, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    from sglang_ascend.ops.sampling import kernels

    tokens = torch.empty(len(logits), dtype=torch.int64)
    kernels.draw_rows(
        logits.float().contiguous().numpy(),
        kept.threshold.numpy(),
        kept.group_max.numpy(),
        GROUP_SIZE,
        seeds.long().numpy(),
        positions.long().numpy(),
        tokens.numpy(),
    )
    return tokens
