"""HiFloat8 (arXiv 2409.16626): 8 bits whose exponent takes the fewer the nearer it is to 0."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_ascend.quantization.formats.base import Listed

NAN, INFINITY, SIGN = 0x80, 0x6F, 0x80
OVERFLOW = 1.25 * 2.0**15  # halfway to where the next number would be


# Where a code without its sign begins, bits of the exponent's field, bits of the fraction.
FIELDS = ((0x60, 4, 1), (0x40, 3, 2), (0x20, 2, 3), (0x10, 1, 3), (0x08, 0, 3))


def _number(code: int) -> float:
    """(-1)^sign 2^E (1 + fraction). E's field is its sign and its bits behind a leading 1 that is
    implied; below the last field lie 2^-22 to 2^-16 and zero."""
    if code == NAN:
        return math.nan
    sign, low = -1.0 if code & SIGN else 1.0, code & ~SIGN
    if low == INFINITY:
        return sign * math.inf
    if low < FIELDS[-1][0]:
        return sign * 2.0 ** (low - 23) if low else 0.0
    _, width, fraction_bits = next(field for field in FIELDS if low >= field[0])
    fraction = (low & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    if width == 0:
        return sign * (1 + fraction)
    leading = 1 << (width - 1)
    field = low >> fraction_bits & (2 * leading - 1)
    exponent = leading | field % leading
    return sign * 2.0 ** (-exponent if field & leading else exponent) * (1 + fraction)


@dataclass(frozen=True)
class HiFloat8(Listed):
    """Codes as CANN and `en_dtypes` have them; zero has no sign."""

    def encode(self, values: Tensor, saturate: bool = True) -> Tensor:
        """The nearest codes, ties away from zero; NaN stays NaN. What is too large is the greatest
        finite number or, without `saturate`, infinity."""
        codes = super().encode(values)
        if not saturate:
            infinity = torch.where(values < 0, INFINITY | SIGN, INFINITY).to(torch.uint8)
            codes = torch.where(values.abs() >= OVERFLOW, infinity, codes)
        return codes.masked_fill(values.isnan(), NAN)


# Blocks are scaled to 15, the greatest number with three bits of fraction.
HIF8 = HiFloat8(
    "hif8", 8, torch.uint8, -(2.0**15), 2.0**15, scaled_to=15.0,
    numbers=tuple(_number(code) for code in range(256)), ties="away",
)  # fmt: skip
