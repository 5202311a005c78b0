"""The one description of a quantized weight, in which all layouts of checkpoints meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import ceil, gcd

import torch
from torch import Tensor

from sglang_ascend.quantization.formats import INT8, NumberFormat
from sglang_ascend.quantization.transforms.rotation import rotated

# The module of the head, in every layout.
HEAD = "lm_head"


class InputKind(StrEnum):
    NONE = "none"  # weight-only: the input stays float
    PER_TOKEN = "per_token"  # scale = max |x| / maximum, for each row of the input
    STATIC = "static"  # one scale and offset, calibrated beforehand


@dataclass(frozen=True)
class InputRule:
    """How a product rounds its input: code = encode(x / scale + offset).

    Attributes:
        kind: where the scale comes from.
        number_format: of the input's codes; meaningless for NONE.
        group_size: PER_TOKEN only: input columns that one scale of a row covers; None is all.
        scale, offset: STATIC only: float32 scalars.
        rotated: PER_TOKEN only: whether x is rotated first, and codes are of the rotated weight.
    """

    kind: InputKind = InputKind.NONE
    number_format: NumberFormat = INT8
    group_size: int | None = None
    scale: float | None = None
    offset: float | None = None
    rotated: bool = False

    def __post_init__(self) -> None:
        is_static = self.kind == InputKind.STATIC
        if (self.scale is not None, self.offset is not None) != (is_static, is_static):
            raise ValueError("a static input rule, and no other, has a scale and an offset")
        if self.rotated and self.kind != InputKind.PER_TOKEN:
            raise ValueError("only inputs that are scaled per token are rotated")


WEIGHT_ONLY = InputRule()
PER_TOKEN = InputRule(InputKind.PER_TOKEN)


@dataclass(frozen=True)
class QuantizedWeight:
    """A linear weight in a number format: value[r, c] = (number of code[r, c] - zero) * its scale.

    Attributes:
        codes: [out, in] of `number_format.dtype`.
        scale: float32 [ceil(out / block[0]), ceil(in / block[1])]. With a group_index any number of
            columns.
        zero: None for 0 everywhere, or integer or float, the shape of scale.
        block: (rows, columns) that one scale covers, counted from row and column 0; the last
            block of either direction may be cut short. Per channel is (1, in) or anything wider.
        number_format: of the codes.
        input_rule: what the product does to its input.
        bias: float32 [out] that a layout folded into its integers, or None. A float `bias` beside
            the weight is not part of this.
        group_index: int64 [in], the scale's column of each input column, in place of
            column // block[1] (GPTQ's act-order); or None.

    Raises:
        ValueError: shapes or dtypes that contradict each other.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    block: tuple[int, int]
    number_format: NumberFormat
    input_rule: InputRule = WEIGHT_ONLY
    bias: Tensor | None = None
    group_index: Tensor | None = None

    def __post_init__(self) -> None:
        out_features, in_features = self.codes.shape
        rows, columns = self.block
        num_blocks = (ceil(out_features / max(rows, 1)), ceil(in_features / max(columns, 1)))
        if self.group_index is not None:
            num_blocks = (num_blocks[0], self.scale.shape[-1])
        problem = None
        if min(rows, columns) < 1:
            problem = f"blocks of {self.block}"
        elif self.codes.dtype != self.number_format.dtype:
            problem = f"codes of {self.codes.dtype} for {self.number_format.name}"
        elif self.scale.dtype != torch.float32 or self.scale.shape != num_blocks:
            problem = f"scales {self.scale.dtype} {list(self.scale.shape)} for {num_blocks} blocks"
        elif self.zero is not None and self.zero.shape != self.scale.shape:
            problem = f"zeros {list(self.zero.shape)} for scales {list(self.scale.shape)}"
        elif self.bias is not None and self.bias.shape != (out_features,):
            problem = f"a bias {list(self.bias.shape)} for {out_features} rows"
        elif self.group_index is not None and self.group_index.shape != (in_features,):
            problem = f"group indices {list(self.group_index.shape)} for {in_features} columns"
        if problem is not None:
            raise ValueError(
                f"a quantized weight {[out_features, in_features]} cannot have {problem}"
            )

    @property
    def shape(self) -> torch.Size:
        """[out, in]"""
        return self.codes.shape

    @property
    def num_bytes(self) -> int:
        """What it takes with its codes packed."""
        others = (self.zero, self.bias, self.group_index)
        held = sum(tensor.nbytes for tensor in others if tensor is not None)
        form = self.number_format
        packed = self.codes.numel() * form.bits + self.scale.numel() * form.scale_bits
        return ceil(packed / 8) + held

    def dequantize(self) -> Tensor:
        """The values, float32 [out, in]."""
        factor = self.factor()
        return rotated(factor, back=True) if self.input_rule.rotated else factor

    def factor(self) -> Tensor:
        """What inputs are multiplied with behind their rule, float32 [out, in]: the values, rotated
        as the inputs are."""
        values = self.number_format.decode(self.codes)
        if self.zero is not None:
            values = values - self._spread(self.zero.to(torch.float32))
        return values * self._spread(self.scale)

    def to(self, device: torch.device) -> QuantizedWeight:
        tensors = {
            f.name: value
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **{name: value.to(device) for name, value in tensors.items()})

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """The weight of outputs start..stop; any bounds, also inside a block."""
        weight = self.refined((gcd(self.block[0], start), self.block[1]))
        blocks = slice(start // weight.block[0], ceil(stop / weight.block[0]))
        return replace(
            weight,
            codes=weight.codes[start:stop],
            scale=weight.scale[blocks],
            zero=None if weight.zero is None else weight.zero[blocks],
            bias=None if weight.bias is None else weight.bias[start:stop],
        )

    def selected(self, rows: Tensor) -> QuantizedWeight:
        """The weight of the outputs `rows`, int64 in any order; a copy."""
        weight = self.refined((1, self.block[1]))
        zero = None if weight.zero is None else weight.zero[rows]
        bias = None if weight.bias is None else weight.bias[rows]
        return replace(
            weight, codes=weight.codes[rows], scale=weight.scale[rows], zero=zero, bias=bias
        )

    def columns(self, start: int, stop: int) -> QuantizedWeight:
        """The weight of inputs start..stop; any bounds, also inside a block.

        The slice that begins at column 0 keeps the bias, so that the products of all slices sum up
        to the product of the whole.

        Raises:
            ValueError: the inputs are rotated, which mixes all of them.
        """
        if self.input_rule.rotated and (start, stop) != (0, self.shape[1]):
            raise ValueError("rotated inputs cannot be cut into parts: serve with --tp-size 1")
        bias = self.bias if start == 0 else None
        codes = self.codes[:, start:stop]
        if self.group_index is not None:
            group_index = self.group_index[start:stop]
            return replace(self, codes=codes, bias=bias, group_index=group_index)
        width = self.block[1] if self.scale.shape[1] == 1 else gcd(self.block[1], start)
        weight = self.refined((self.block[0], width))
        blocks = slice(start // width, ceil(stop / width))
        zero = None if weight.zero is None else weight.zero[:, blocks]
        return replace(weight, codes=codes, scale=weight.scale[:, blocks], zero=zero, bias=bias)

    def refined(self, block: tuple[int, int]) -> QuantizedWeight:
        """The same values with smaller blocks: sizes that divide the present ones, or any size in a
        direction in which one block covers all."""
        if block == self.block:
            return self
        scale, zero = self.scale, self.zero
        for dim, size in enumerate(block):
            if dim == 1 and self.group_index is not None:
                continue
            repeats = ceil(min(self.block[dim], self.shape[dim]) / size)
            num_blocks = ceil(self.shape[dim] / size)
            scale = scale.repeat_interleave(repeats, dim).narrow(dim, 0, num_blocks)
            if zero is not None:
                zero = zero.repeat_interleave(repeats, dim).narrow(dim, 0, num_blocks)
        return replace(self, scale=scale, zero=zero, block=block)

    def _spread(self, values: Tensor) -> Tensor:
        """`values` of blocks as [out, in]."""
        out_features, in_features = self.shape
        by_row = values.repeat_interleave(self.block[0], 0)[:out_features]
        if self.group_index is not None:
            return by_row[:, self.group_index]
        return by_row.repeat_interleave(self.block[1], 1)[:, :in_features]


NOT_ALIKE = (
    "weights that differ in inputs, number format, input rule or group index cannot be one fused "
    "projection; quantize its parts alike"
)


def dense(weight: Tensor | QuantizedWeight) -> Tensor:
    """Its values [out, in], of a float weight itself."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def joined(parts: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
    """One weight of all outputs of `parts`, in order; float where one of them is.

    Raises:
        ValueError: as `concatenate`.
    """
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) < len(parts):
        return torch.cat([dense(part) for part in parts])
    return concatenate(quantized) if len(quantized) > 1 else quantized[0]


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight of all outputs of `weights`, in order, as a fused projection has them.

    Blocks are made as small as all of them need; integers of several widths take the widest.

    Raises:
        ValueError: they differ in what no common weight can hold: inputs, integer and float codes,
            input rule, or order of columns.
    """
    first = weights[0]
    for weight in weights:
        if (
            weight.shape[1] != first.shape[1]
            or not _is_one_format(weight.number_format, first.number_format)
            or weight.input_rule != first.input_rule
            or not _same(weight.group_index, first.group_index)
        ):
            raise ValueError(NOT_ALIKE)
    bounds = [weight.shape[0] for weight in weights[:-1]]
    rows = gcd(*bounds, *(w.block[0] for w in weights if w.scale.shape[0] > 1)) or first.block[0]
    columns = gcd(*(w.block[1] for w in weights if w.scale.shape[1] > 1)) or first.block[1]
    parts = [weight.refined((rows, columns)) for weight in weights]
    zero = bias = None
    if any(part.zero is not None for part in parts):
        zero = torch.cat([_or_zeros(p.zero, p.scale).to(torch.float32) for p in parts])
        if not any(p.zero is not None and p.zero.is_floating_point() for p in parts):
            zero = zero.to(torch.int32)
    if any(part.bias is not None for part in parts):
        bias = torch.cat([_or_zeros(p.bias, p.scale.new_empty(p.shape[0])) for p in parts])
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        zero=zero,
        number_format=max((part.number_format for part in parts), key=lambda f: f.bits),
        bias=bias,
    )


def _is_one_format(one: NumberFormat, other: NumberFormat) -> bool:
    """Integers of any widths are; codes of a table mean what that table says."""
    return one == other or (one.is_integer and other.is_integer)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right or (left is not None and right is not None and torch.equal(left, right))


def _or_zeros(values: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if values is None else values
