"""The rotations by torch_npu's fused operators."""

from __future__ import annotations

import torch


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    # [batch, rows, heads, dim] with cosines [1, rows, 1, dim].
    return torch.ops.npu.npu_rotary_mul(x[None], cos[None, :, None], sin[None, :, None])[0]


def accepts_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Widths below 896 and fewer than 1,000 heads."""
    return x.shape[-1] < 896 and x.shape[1] < 1000 and cos.dtype == x.dtype


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    # [batch, heads, 1, dim] with cosines [batch, 1, 1, dim]: a row is a batch.
    rotated = torch.ops.npu.npu_interleave_rope(
        x[:, :, None], cos[:, None, None], sin[:, None, None]
    )
    return rotated[:, :, 0]


def accepts_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """64 columns, as DeepSeek's models have."""
    return x.shape[-1] == 64 and cos.dtype == x.dtype
