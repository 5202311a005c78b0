"""Quantized products by torch_npu's fused operators.

Weights lie [(groups,) in, out], in the storage format that suits the device; int4 codes are packed
by torch_npu itself, eight to an int32. What a call needs beside its input is made at load.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from sglang_ascend.ops.quantized import integer, weight_only
from sglang_ascend.ops.quantized.weights import IntegerWeight, PreparedCodes, WeightOnly

# What npu_dynamic_quant and npu_weight_quant_batchmatmul take.
INPUTS = (torch.float16, torch.bfloat16)
COUNTS_OF_EXPERTS, ONE_RESULT, GROUPS_OF_ROWS = 1, 2, 0
LAST_AXIS = -1
FRACTAL_NZ = 29  # tiles of 16 x 32 bytes


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
    return scale.shape[-1] == 1 and (not _is_packed(codes, bits) or codes.shape[-2] % 8 == 0)


def _is_packed(codes: torch.Tensor, bits: int) -> bool:
    return bits == 4 and codes.dim() == 3


def prepare_integer(
    codes: torch.Tensor, scale: torch.Tensor, *, bits: int = 8, **options
) -> IntegerWeight:
    """int4 of one matrix are multiplied as int8: torch_npu's product takes one kind on both sides.

    A product of int8 rows with packed int4 is of x - 8, and needs 8 * sum of code * scale back.
    """
    weight = integer.prepare_integer(codes, scale, bits=bits, **options)
    matrix = _matrix_of(replace(weight, codes=codes))
    columns = matrix.codes.contiguous()
    if _is_packed(codes, bits):
        units = codes.sum(-1, dtype=torch.int32).float()
        # The operator reads a scale's bits out of an int64.
        bits_of_scale = matrix.scale.contiguous().view(torch.int32).long().unsqueeze(1)
        bias = 8 * units * matrix.scale
        matrix = replace(matrix, codes=_packed(columns), scale=bits_of_scale, bias=bias)
    else:
        matrix = replace(matrix, codes=_in_tiles(columns), scale=matrix.scale.contiguous())
    return replace(weight, **_packed_fields(weight, matrix))


def _packed_fields(weight: PreparedCodes, matrix: Matrix) -> dict:
    """Nothing is resident twice."""
    codes = weight.codes.new_empty(0)
    return {"codes": codes, "packed": matrix, "opaque_bytes": matrix.num_bytes}


def _packed(columns: torch.Tensor) -> torch.Tensor:
    """int8 [..., in, out] in -8..7 -> int32 [..., in, out / 8]"""
    rows = columns.flatten(0, -2).int()
    packed = torch.ops.npu.npu_convert_weight_to_int4pack(rows)
    return packed.view(*columns.shape[:-1], -1)


def _in_tiles(columns: torch.Tensor) -> torch.Tensor:
    """int8 [..., in, out] in the storage format of the matrix unit, where whole tiles cover it."""
    if columns.shape[-2] % 16 or columns.shape[-1] % 32:
        return columns
    return torch.ops.npu.npu_format_cast(columns, FRACTAL_NZ)


def accepts_integer(
    x: torch.Tensor, weight: IntegerWeight, bias: torch.Tensor | None = None
) -> bool:
    """The static form's float bias would be rounded apart."""
    is_static = weight.input_scale is not None
    return accepts_groups(x, weight) and not (is_static and bias is not None)


def accepts_groups(
    x: torch.Tensor, weight: IntegerWeight, counts: torch.Tensor | None = None
) -> bool:
    """int8 that the reference prepared are taken too."""
    is_plain = weight.bits == 8 and weight.packed is None and weight.scale.shape[-1] == 1
    return x.dtype in INPUTS and (is_plain or isinstance(weight.packed, Matrix))


def _matrix_of(weight: IntegerWeight) -> Matrix:
    if weight.packed is not None:
        return weight.packed
    step = weight.input_scale
    return Matrix(
        codes=weight.codes.transpose(-1, -2),
        scale=weight.scale.squeeze(-1),
        bias=weight.quant_bias,
        inverse_input_scale=None if step is None else 1 / step,
    )


def integer_linear(
    x: torch.Tensor, weight: IntegerWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A static input is multiplied by 1 / scale: at a tie its code may be the other neighbour."""
    rows, matrix = x.reshape(-1, x.shape[-1]), _matrix_of(weight)
    if matrix.inverse_input_scale is None:
        codes, row_scale = torch.ops.npu.npu_dynamic_quant(rows)
    else:
        of_input = matrix.inverse_input_scale, weight.input_offset
        codes = torch.ops.npu.npu_quantize(rows, *of_input, torch.qint8, LAST_AXIS, False)
        row_scale, bias = None, matrix.bias
    product = torch.ops.npu.npu_quant_matmul(
        codes,
        matrix.codes,
        matrix.scale,
        pertoken_scale=row_scale,
        bias=bias,
        output_dtype=x.dtype,
    )
    return product.view(*x.shape[:-1], product.shape[-1])


def grouped_integer_linear(
    x: torch.Tensor, weight: IntegerWeight, counts: torch.Tensor
) -> torch.Tensor:
    codes, row_scale = torch.ops.npu.npu_dynamic_quant(x)
    matrix = _matrix_of(weight)
    return _grouped_matmul(
        codes,
        matrix,
        counts,
        x.dtype,
        scale=[matrix.scale],
        per_token_scale=[row_scale],
        bias=None if matrix.bias is None else [matrix.bias],
    )


def _grouped_matmul(
    x: torch.Tensor, matrix: Matrix, counts: torch.Tensor, dtype: torch.dtype, **scales
) -> torch.Tensor:
    (product,) = torch.ops.npu.npu_grouped_matmul(
        [x],
        [matrix.codes],
        **scales,
        group_list=counts,
        group_list_type=COUNTS_OF_EXPERTS,
        split_item=ONE_RESULT,
        group_type=GROUPS_OF_ROWS,
        output_dtype=dtype,
    )
    return product


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
    if not one_matrix and group_index is not None:
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
    matrix = _offset_matrix(weight, ordered)
    columns = matrix.codes.contiguous()
    dtype, offset = dtype or scale.dtype, matrix.offset
    matrix = replace(
        matrix,
        codes=_packed(columns) if bits == 4 else columns,
        scale=matrix.scale.to(dtype),
        offset=None if offset is None else offset.to(dtype),
    )
    return replace(weight, **_packed_fields(weight, matrix))


def _offset_matrix(weight: WeightOnly, codes: torch.Tensor) -> Matrix:
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


def _decoded_matrix_of(weight: WeightOnly) -> Matrix:
    return weight.packed or _offset_matrix(weight, weight.codes)


def accepts_weight_only(
    x: torch.Tensor, weight: WeightOnly, rest: torch.Tensor | None = None
) -> bool:
    """int8 that the reference prepared are taken too."""
    of_groups = weight.group_size % 32 == 0 and weight.group_size > 0 and weight.codes.dim() == 2
    fits = weight.scale.shape[-1] == 1 or of_groups
    is_plain = weight.bits == 8 and weight.packed is None and fits
    return x.dtype in INPUTS and (is_plain or isinstance(weight.packed, Matrix))


def weight_only_linear(
    x: torch.Tensor, weight: WeightOnly, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Scales and offsets are of the input's dtype."""
    rows, matrix = x.reshape(-1, x.shape[-1]), _decoded_matrix_of(weight)
    rows = rows if weight.order is None else rows[:, weight.order]
    if bias is not None and x.dtype == torch.bfloat16:
        bias = bias.float()
    product = torch.ops.npu.npu_weight_quant_batchmatmul(
        rows,
        matrix.codes,
        antiquant_scale=matrix.scale.to(x.dtype),
        antiquant_offset=None if matrix.offset is None else matrix.offset.to(x.dtype),
        bias=bias,
        antiquant_group_size=0 if matrix.scale.shape[0] == 1 else weight.group_size,
    )
    return product.view(*x.shape[:-1], product.shape[-1])


def grouped_weight_only_linear(
    x: torch.Tensor, weight: WeightOnly, counts: torch.Tensor
) -> torch.Tensor:
    matrix = _decoded_matrix_of(weight)
    assert matrix.offset is not None  # of groups
    return _grouped_matmul(
        x,
        matrix,
        counts,
        x.dtype,
        antiquant_scale=[matrix.scale.to(x.dtype)],
        antiquant_offset=[matrix.offset.to(x.dtype)],
    )
