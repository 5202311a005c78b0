"""Definitions of root-mean-square norms (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension, computed in float32.

    Args:
        x: float [..., width].
        weight: [width] in the dtype of ``x``.

    Returns:
        [..., width] in the dtype of ``x``. Does not synchronise.
    """
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of ``x + residual``, and the sum itself: the next layer's residual.

    Shapes and dtypes as in ``rms_norm``; the sum is rounded to the dtype of ``x`` after the norm
    was taken of it. Does not synchronise.
    """
    total = x.float() + residual.float()
    inverse_rms = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    return (total * inverse_rms * weight.float()).to(x.dtype), total.to(x.dtype)
