"""The gated activation by torch_npu's fused operator."""

from __future__ import annotations

import torch


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return torch.ops.npu.npu_swiglu(gate_up)
