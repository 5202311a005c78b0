"""Definition of SwiGLU (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x = [gate, up]: float [..., 2 * width] -> [..., width], by way of float32.

    Does not synchronise.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
