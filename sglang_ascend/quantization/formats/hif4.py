"""HiFloat4 (arXiv 2602.11287): 64 elements of 4 bits and 32 bits of scales in three levels.

Read from two public emulations of it, and written anew from the definition below; no vendor's
bits were at hand to compare with. For 64 values in 8 groups of 8, each of 2 groups of 4:

- scale = the largest magnitude / 7, rounded to E6M2 (6 bits of exponent, 2 of fraction, 2^-48 to
  1.5 * 2^15);
- one bit for each 8 values doubles it where their largest is at least 4 scales;
- one bit for each 4 values doubles it again where their largest is at least 2 scales by then;
- an element is a sign and a magnitude of 0 to 7 quarters, ties away from zero.

So one scale covers 4 columns and takes 2 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_ascend.quantization.formats.base import Listed

COLUMNS = 64
SCALES = 16  # of one unit
LEAST, GREATEST = 2.0**-48, 1.5 * 2.0**15


@dataclass(frozen=True)
class HiFloat4(Listed):
    @property
    def unit(self) -> int:
        return COLUMNS

    def scale(self, largest: Tensor) -> Tensor:
        """Of groups of 4 columns [..., groups], which 16 by 16 make a unit."""
        groups = largest.shape[-1]
        units = F.pad(largest, (0, -groups % SCALES)).unflatten(-1, (-1, 8, 2))
        first = _e6m2(units.amax((-2, -1), keepdim=True) / 7)
        second = 1 + (units.amax(-1, keepdim=True) >= 4 * first).to(largest.dtype)
        third = 1 + (units >= 2 * first * second).to(largest.dtype)
        return (first * second * third).flatten(-3)[..., :groups]


def _e6m2(values: Tensor) -> Tensor:
    """The nearest numbers 2^E (1 + quarters); ties to even."""
    values = values.clamp(LEAST, GREATEST)
    quarter = torch.exp2(torch.frexp(values).exponent.to(values.dtype) - 3)
    return ((values / quarter).round() * quarter).clamp_max(GREATEST)


_MAGNITUDES = tuple(quarters / 4 for quarters in range(8))
HIF4 = HiFloat4(
    "hif4", 4, torch.uint8, -1.75, 1.75, scale_bits=2, group_size=COLUMNS // SCALES,
    searchable=False, numbers=(*_MAGNITUDES, *(-m for m in _MAGNITUDES)), ties="away",
)  # fmt: skip
