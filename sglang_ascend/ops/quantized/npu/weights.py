"""Quantized weights as torch_npu's fused operators take them.

They lie [(groups,) in, out], in the storage format that suits the device; int4 codes are packed by
torch_npu itself, eight to an int32. What a call needs beside its input is made at load. On the meta
device weights have the shapes that they have on an NPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from sglang_ascend.ops.npu.constraint import FRACTAL_NZ
from sglang_ascend.ops.quantized import integer, weight_only
from sglang_ascend.ops.quantized.weights import IntegerWeight, PreparedCodes, WeightOnly

# No product takes a matrix of more rows or columns; a head on one rank often has.
MOST_COLUMNS = 65535


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A weight as a fused operator takes it."""

    codes: torch.Tensor  # int8 [(groups,) in, out], or int32 of eight int4 each
    scale: torch.Tensor
    bias: torch.Tensor | None = None
    inverse_input_scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        values = (getattr(self, field.name) for field in fields(self))
        return sum(value.nbytes for value in values if value is not None)


def accepts_integer_codes(
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    bits: int = 8,
    **options,
) -> bool:
    """One scale a channel. int4 of groups are packed, in eights of the outputs."""
    packs = not _is_packed(codes, bits) or codes.shape[-2] % 8 == 0
    return scale.shape[-1] == 1 and packs and fits(codes)


def fits(codes: torch.Tensor) -> bool:
    """Whether a product takes so many rows and columns."""
    return max(codes.shape[-2:]) <= MOST_COLUMNS


def _is_packed(codes: torch.Tensor, bits: int) -> bool:
    return bits == 4 and codes.dim() == 3


def prepare_integer(
    codes: torch.Tensor, scale: torch.Tensor, *, bits: int = 8, **options
) -> IntegerWeight:
    """int4 of one matrix are multiplied as int8: torch_npu's product takes one kind on both sides.

    A product of int8 rows with packed int4 is of x - 8, and needs 8 * sum of code * scale back.
    """
    weight = integer.prepare_integer(codes, scale, bits=bits, **options)
    matrix = matrix_of(replace(weight, codes=codes))
    columns = matrix.codes.contiguous()
    if _is_packed(codes, bits):
        units = codes.sum(-1, dtype=torch.int32).float()
        # The operator reads a scale's bits out of an int64.
        bits_of_scale = matrix.scale.contiguous().view(torch.int32).long().unsqueeze(1)
        bias = 8 * units * matrix.scale
        matrix = replace(matrix, codes=_packed(columns), scale=bits_of_scale, bias=bias)
    else:
        # Servers have bfloat16, for which the product of groups takes no other scales.
        scale = matrix.scale if codes.dim() == 2 else matrix.scale.bfloat16()
        matrix = replace(matrix, codes=_in_tiles(columns), scale=scale.contiguous())
    return replace(weight, quant_bias=None, **_packed_fields(weight, matrix))


def _packed_fields(weight: PreparedCodes, matrix: Matrix) -> dict[str, Any]:
    """Nothing is resident twice."""
    emptied = {"codes": weight.codes.new_empty(0), "scale": weight.scale.new_empty(0)}
    return {**emptied, "packed": matrix, "opaque_bytes": matrix.num_bytes}


def _packed(columns: torch.Tensor) -> torch.Tensor:
    """int8 [..., in, out] in -8..7 -> int32 [..., in, out / 8]"""
    shape = (*columns.shape[:-1], columns.shape[-1] // 8)
    if columns.is_meta:
        return columns.new_empty(shape, dtype=torch.int32)
    rows = columns.flatten(0, -2).int()
    packed = torch.ops.npu.npu_convert_weight_to_int4pack(rows)
    return packed.view(shape)


def _in_tiles(columns: torch.Tensor) -> torch.Tensor:
    """int8 [..., in, out] in the storage format of the matrix unit, where whole tiles cover it."""
    if columns.is_meta or columns.shape[-2] % 16 or columns.shape[-1] % 32:
        return columns
    return torch.ops.npu.npu_format_cast(columns, FRACTAL_NZ)


def matrix_of(weight: IntegerWeight) -> Matrix:
    if weight.packed is not None:
        return weight.packed
    step = weight.input_scale
    return Matrix(
        codes=weight.codes.transpose(-1, -2),
        scale=weight.scale.squeeze(-1),
        bias=weight.quant_bias,
        inverse_input_scale=None if step is None else 1 / step,
    )


def accepts_weight_only_codes(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    bits: int = 8,
    group_size: int | None = None,
    group_index: torch.Tensor | None = None,
    **options,
) -> bool:
    """Scales of channels, or of whole groups of 32 columns or a multiple; int4 in eights of the
    outputs. Groups of rows have int8 by channel only, and one order of columns.
    """
    width, of_channels = codes.shape[-1], scale.shape[-1] == 1
    size = group_size or width
    of_groups = width % size == 0 and size % 32 == 0
    packs = bits == 8 or codes.shape[-2] % 8 == 0
    one_matrix = codes.dim() == 2
    if not fits(codes) or (not one_matrix and group_index is not None):
        return False
    return packs and (of_channels or (of_groups and (one_matrix or bits == 4)))


def prepare_weight_only(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    bits: int = 8,
    dtype: torch.dtype | None = None,
    **options,
) -> WeightOnly:
    weight = weight_only.prepare_weight_only(codes, scale, zero, bits=bits, **options)
    if weight.group_size == 0:  # of groups that are not alike, as a rank's share of some columns is
        return weight
    ordered = codes if weight.order is None else codes[..., weight.order]
    matrix = offset_matrix(weight, ordered)
    columns = matrix.codes.contiguous()
    dtype, offset = dtype or scale.dtype, matrix.offset
    matrix = replace(
        matrix,
        codes=_packed(columns) if bits == 4 else columns,
        scale=matrix.scale.to(dtype),
        offset=None if offset is None else offset.to(dtype),
    )
    return replace(weight, zero=None, **_packed_fields(weight, matrix))


def offset_matrix(weight: WeightOnly, codes: torch.Tensor) -> Matrix:
    """torch_npu adds its offset, value = (code + offset) * scale, so zeros go in negated. Groups of
    rows always have offsets.
    """
    scale, zero = weight.scale.transpose(-1, -2).contiguous(), weight.zero
    offset = None if zero is None else -zero.transpose(-1, -2).contiguous()
    if codes.dim() == 3:
        offset = torch.zeros_like(scale) if offset is None else offset
        if scale.shape[1] == 1:
            scale, offset = scale.squeeze(1), offset.squeeze(1)
    return Matrix(codes=codes.transpose(-1, -2), scale=scale, offset=offset)
