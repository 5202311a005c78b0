"""SwiGLU by torch_npu's fused operator."""

from __future__ import annotations

import torch


def swiglu(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.npu.npu_swiglu(x)
