"""A set of numbers that codes stand for, with the rounding to it and the scale of a block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

LEAST_POWER, GREATEST_POWER = -127, 127  # of an E8M0 scale


@dataclass(frozen=True)
class NumberFormat:
    """A set of numbers, with the rounding to it.

    Attributes:
        name: as a recipe or a table shows it.
        bits: of one code when packed; in memory a code takes one byte.
        dtype: of the codes; int8 carries every integer format, uint8 every table of numbers.
        minimum, maximum: the range of the numbers.
        scaled_to: the magnitude that a block's largest value gets; None is `maximum`.
        scale_bits: what one scale takes when packed.
        group_size: columns of one scale that the format itself prescribes, or None.
        power_of_two: whether scales are powers of two (E8M0 of the OCP microscaling formats).
        searchable: whether a block's scale may be chosen without the blocks beside it.
    """

    name: str
    bits: int
    dtype: torch.dtype
    minimum: float
    maximum: float
    scaled_to: float | None = None
    scale_bits: int = 32
    group_size: int | None = None
    power_of_two: bool = False
    searchable: bool = True

    @property
    def is_integer(self) -> bool:
        return self.dtype == torch.int8

    @property
    def unit(self) -> int:
        """Columns that are stored together: of one byte, or of one scale that the format has."""
        return self.group_size or 8 // self.bits

    def encode(self, values: Tensor) -> Tensor:
        """The codes (`dtype`, same shape) nearest to `values`; ties to even, ends saturate."""
        held = values.clamp(self.minimum, self.maximum)
        return (held.round() if self.is_integer else held).to(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        """The numbers that `codes` stand for, float32, exactly."""
        return codes.to(torch.float32)

    def holds(self, codes: Tensor) -> bool:
        """Whether all of `codes` (`dtype`) stand for finite numbers of this format."""
        values = codes.to(torch.float32) if self.bits == 8 else codes
        return bool(((values >= self.minimum) & (values <= self.maximum)).all())  # NaN is neither

    def scale(self, largest: Tensor) -> Tensor:
        """The scales of blocks whose greatest magnitudes are `largest`; 1 where that is 0.

        A power of two is that of OCP's formats: 2^(floor(log2 largest) - floor(log2 maximum)).
        """
        if self.power_of_two:
            power = torch.frexp(largest).exponent - math.frexp(self.maximum)[1]
            power = power.clamp(LEAST_POWER, GREATEST_POWER).to(largest.dtype)
            scale = torch.exp2(power)
        else:
            scale = largest / (self.scaled_to or self.maximum)
        return torch.where(largest > 0, scale, 1.0)


@dataclass(frozen=True)
class Listed(NumberFormat):
    """Numbers from a table, by code.

    Attributes:
        numbers: of every code; NaN and infinity are decoded and never encoded.
        ties: between two numbers: to the greater magnitude, or to the even code.
    """

    numbers: tuple[float, ...] = ()
    ties: Literal["away", "even"] = "even"

    def encode(self, values: Tensor) -> Tensor:
        wide = values if values.dtype == torch.float64 else values.float()
        codes, thresholds = _search(self, wide.dtype)
        place = torch.bucketize(wide, thresholds.to(values.device), right=True)
        return codes.to(values.device)[place]

    def decode(self, codes: Tensor) -> Tensor:
        numbers = torch.tensor(self.numbers, dtype=torch.float32, device=codes.device)
        return numbers[codes.int()]

    def holds(self, codes: Tensor) -> bool:
        return int(codes.max()) < len(self.numbers) and bool(self.decode(codes).isfinite().all())


@cache
def _search(form: Listed, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of n ascending numbers their codes [n], and where each but the first begins, in `dtype`."""
    found = {number: code for code, number in reversed([*enumerate(form.numbers)])}
    finite = sorted(number for number in found if number - number == 0)
    codes = [found[number] for number in finite]
    low, high = (torch.tensor(part, dtype=torch.float64) for part in (finite[:-1], finite[1:]))
    middle = (low + high) / 2
    goes_up = middle > 0 if form.ties == "away" else torch.tensor(codes[1:]) % 2 == 0
    near = middle.to(dtype)  # of a coarser dtype, the numbers on either side of a middle
    above = torch.nextafter(near, torch.full_like(near, torch.inf))
    is_first = (near > middle) | (goes_up & (near == middle))
    return torch.tensor(codes, dtype=torch.uint8), torch.where(is_first, near, above)
