"""Rotation: x W^T = (x R)(W R)^T for an orthogonal R, which spreads a large channel over many.

R = O ⊗ H of the size's odd factor and the power of two that is left. O[j, k] = cos + sin of
2 pi j k / n (Hartley's transform), H[j, k] = (-1)^(bits of j & k), rows with the signs of the
Rudin-Shapiro sequence, each over the root of its size. So the size alone says what R is.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor


def rotated(x: Tensor, back: bool = False) -> Tensor:
    """`x` [..., size] times R, or R^T to go back; in float32, of float64 in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    odd, even = _factors(x.shape[-1], wide, x.device)
    if back:
        odd, even = odd.T, even.T
    folded = x.to(wide).unflatten(-1, (len(odd), len(even))) @ even
    return (odd.T @ folded).flatten(-2).to(x.dtype)


@cache
def _factors(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """O [odd, odd] and H [even, even]."""
    even = size & -size
    odd = size // even
    with torch.inference_mode(False):
        places = torch.arange(odd, dtype=torch.float64)
        angle = places[:, None] * places % odd * (2 * math.pi / odd)
        hartley = (angle.cos() + angle.sin()) / odd**0.5
        rows = torch.arange(even)
        hadamard = _sign(rows[:, None] & rows) * _sign(rows & rows >> 1)[:, None] / even**0.5
        return hartley.to(device, dtype), hadamard.to(device, dtype)


def _sign(words: Tensor) -> Tensor:
    """float64: -1 where a word has an odd number of bits."""
    bits = words[..., None] >> torch.arange(32) & 1
    return 1.0 - 2.0 * (bits.sum(-1) % 2).double()
