"""RMSNorm alone and after a residual addition, and the gated activation: float32 inside."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulation.goldens.registry import golden


def normalized(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """y = x * rstd * gamma and rstd = 1 / sqrt(mean(x^2) + epsilon), over gamma's dimensions."""
    dims = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.float().square().mean(dims, keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


@golden("npu::npu_rms_norm")
def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return normalized(input, gamma, epsilon)


@golden("npu::npu_add_rms_norm")
def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, rstd, x1 + x2)."""
    x = (x1.float() + x2.float()).to(x1.dtype)
    return *normalized(x, gamma, epsilon), x


@golden("npu::npu_swiglu")
def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, up = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)
