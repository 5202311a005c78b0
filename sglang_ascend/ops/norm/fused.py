"""The norms by torch_npu's fused operators."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.ops.npu.npu_rms_norm(x, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
    return normed, total
