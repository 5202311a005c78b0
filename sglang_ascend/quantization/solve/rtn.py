"""Round to nearest: scales from the extreme values of each block, codes by rounding."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_ascend.quantization.formats import NumberFormat
from sglang_ascend.quantization.weight import WEIGHT_ONLY, InputRule, QuantizedWeight

SHRINKS = [1 - 0.01 * step for step in range(41)]


@dataclass(frozen=True)
class Grid:
    """The numbers that a weight may be rounded to.

    Attributes:
        number_format: of the codes.
        block: (rows, columns) that share one scale; None is all rows, or all columns.
        symmetric: whether zero is code 0. Otherwise each block has an integer zero point, and the
            range from its least to its greatest value, with 0 inside, takes all codes.

    Raises:
        ValueError: zero points of a format that is no integer, or blocks that it does not have.
    """

    number_format: NumberFormat
    block: tuple[int | None, int | None] = (1, None)
    symmetric: bool = True

    def __post_init__(self) -> None:
        if not self.symmetric and not self.number_format.is_integer:
            raise ValueError(f"{self.number_format.name} has no zero point: set symmetric to true")
        own = self.number_format.group_size
        if own is not None and self.block != (1, own):
            raise ValueError(f"{self.number_format.name} has one scale for {own} columns of a row")

    def block_of(self, weight: Tensor) -> tuple[int, int]:
        """The block's size for `weight` [out, in]."""
        rows, columns = self.block
        return rows or weight.shape[0], columns or weight.shape[1]

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scale and zero (None if symmetric), in the dtype of `weight` [out, in], one per block.

        Symmetric: the format's scale of max |w|, of integers max |w| / maximum. Asymmetric:
        scale = (high - low) / (maximum - minimum), zero = round(minimum - low / scale).
        A block of zeros has scale 1.

        With `importance` [in] these are the widest scales; each block takes, of the shares
        `SHRINKS` of its range, the one with the least sum of importance * (w - q)^2: what is
        clipped pays for finer steps.
        """
        high, low = self.range_of(weight)
        scale, zero = self.scaled(high, low)
        if importance is None:
            return scale, zero
        self.check_searchable()
        best = torch.full_like(scale, torch.inf)
        for share in SHRINKS:
            new_scale, new_zero = self.scaled(high * share, low * share)
            error = weight - self.rounded(weight, new_scale, new_zero)
            cost = per_block(error.square() * importance, self.block_of(weight), "sum")
            scale = torch.where(cost < best, new_scale, scale)
            if zero is not None and new_zero is not None:
                zero = torch.where(cost < best, new_zero, zero)
            best = torch.minimum(cost, best)
        return scale, zero

    def check_searchable(self) -> None:
        """
        Raises:
            ValueError: the scales of several blocks are of one unit.
        """
        if not self.number_format.searchable:
            raise ValueError(f"{self.number_format.name} takes method minmax only")

    def rounded(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """`weight` [out, in] at the nearest numbers of its blocks, in its dtype."""
        block, shape = self.block_of(weight), weight.shape
        spread_scale = spread(scale, block, shape)
        offset = 0.0 if zero is None else spread(zero, block, shape)
        codes = self.number_format.encode(weight / spread_scale + offset)
        return (self.number_format.decode(codes).to(weight.dtype) - offset) * spread_scale

    def range_of(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The greatest and the least value of each block, 0 among them."""
        block = self.block_of(weight)
        high = per_block(weight.clamp_min(0), block, "amax")
        return high, -per_block((-weight).clamp_min(0), block, "amax")

    def scaled(self, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scale and zero of blocks that span from `low` to `high`."""
        form = self.number_format
        if self.symmetric:
            return form.scale(torch.maximum(high, -low)), None
        scale = (high - low) / (form.maximum - form.minimum)
        scale = torch.where(scale > 0, scale, 1.0)
        return scale, (form.minimum - low / scale).round()

    def quantized(
        self, weight: Tensor, scale: Tensor, zero: Tensor | None, input_rule: InputRule
    ) -> QuantizedWeight:
        """`weight` [out, in] rounded to nearest at scales and integer zeros of its blocks."""
        values, block, scale = weight.double(), self.block_of(weight), scale.float()
        codes = values / spread(scale.double(), block, weight.shape)
        if zero is not None:
            codes += spread(zero.double(), block, weight.shape)
        return QuantizedWeight(
            codes=self.number_format.encode(codes),
            scale=scale,
            zero=None if zero is None else zero.to(torch.int32),
            block=block,
            number_format=self.number_format,
            input_rule=input_rule,
        )


def rtn(
    weight: Tensor,
    grid: Grid,
    input_rule: InputRule = WEIGHT_ONLY,
    importance: Tensor | None = None,
) -> QuantizedWeight:
    """Every value of float `weight` [out, in] rounded to the nearest of its block's numbers; with
    `importance` at searched scales (`Grid.fit`)."""
    return grid.quantized(weight, *grid.fit(weight.double(), importance), input_rule)


def spread(per_block: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """One value per element, [out, in], from one per block."""
    rows = per_block.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def per_block(values: Tensor, block: tuple[int, int], reduction: str) -> Tensor:
    """`values` [out, in], reduced in each block; what a cut block lacks counts as 0."""
    rows, columns = (ceil(size / side) for size, side in zip(values.shape, block, strict=True))
    padding = (0, columns * block[1] - values.shape[1], 0, rows * block[0] - values.shape[0])
    blocks = F.pad(values, padding).view(rows, block[0], columns, block[1])
    return getattr(blocks, reduction)((1, 3))
