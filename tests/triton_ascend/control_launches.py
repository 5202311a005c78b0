"""Launches of control kernels that run in processes of their own, which import this file."""

from __future__ import annotations

import torch
from launches import Launch


def gather_if_inside(place: int) -> Launch:
    """Sixteen times ``place`` of 32 elements, under a mask that asks whether there is one."""
    places = torch.full((16,), place, dtype=torch.int32)
    return Launch((1,), (torch.zeros(32), places, torch.zeros(16), 32), {}, ())


def store_positive(num_positive: int) -> Launch:
    """Of 16 values the positive ones come first, and the output has 8 elements."""
    x = torch.where(torch.arange(16) < num_positive, 1.0, -1.0)
    return Launch((1,), (x, torch.zeros(8)), {}, ())
