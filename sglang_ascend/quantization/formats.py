"""Number formats of codes and of quantized inputs: their values, and the rounding to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NumberFormat:
    """A set of numbers, with the rounding to it.

    Attributes:
        name: as a recipe or a table shows it.
        bits: of one code when packed; in memory a code takes one byte.
        dtype: of the codes; int8 carries every integer format.
        minimum, maximum: the range of the numbers.
    """

    name: str
    bits: int
    dtype: torch.dtype
    minimum: float
    maximum: float

    @property
    def is_integer(self) -> bool:
        return not self.dtype.is_floating_point

    def encode(self, values: Tensor) -> Tensor:
        """The codes (`dtype`, same shape) nearest to `values`; ties to even, ends saturate."""
        held = values.clamp(self.minimum, self.maximum)
        return (held.round() if self.is_integer else held).to(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        """The numbers that `codes` stand for, float32, exactly."""
        return codes.to(torch.float32)


def _integer(bits: int) -> NumberFormat:
    half = 1 << (bits - 1)
    return NumberFormat(f"int{bits}", bits, torch.int8, -half, half - 1)


INT2, INT4, INT8 = _integer(2), _integer(4), _integer(8)
FP8_E4M3 = NumberFormat("fp8_e4m3", 8, torch.float8_e4m3fn, -448.0, 448.0)
FORMATS = {format.name: format for format in (INT2, INT4, INT8, FP8_E4M3)}
