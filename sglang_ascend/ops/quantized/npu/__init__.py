"""Quantized products by torch_npu's fused operators."""

from __future__ import annotations

import torch

from sglang_ascend.ops.quantized.npu.weights import (
    Matrix,
    accepts_integer_codes,
    accepts_weight_only_codes,
    fits,
    matrix_of,
    offset_matrix,
    prepare_integer,
    prepare_weight_only,
)
from sglang_ascend.ops.quantized.weights import IntegerWeight, WeightOnly

__all__ = [
    "accepts_groups",
    "accepts_integer",
    "accepts_integer_codes",
    "accepts_weight_only",
    "accepts_weight_only_codes",
    "grouped_integer_linear",
    "grouped_weight_only_linear",
    "integer_linear",
    "prepare_integer",
    "prepare_weight_only",
    "weight_only_linear",
]

# What npu_dynamic_quant and npu_weight_quant_batchmatmul take.
INPUTS = (torch.float16, torch.bfloat16)
COUNTS_OF_EXPERTS, ONE_RESULT, GROUPS_OF_ROWS = 1, 2, 0
LAST_AXIS = -1
# What the product of int8 groups takes as scales of the outputs, by the type of its result.
SCALES_OF_GROUPS = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}


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
    is_taken = fits(weight.codes) and (is_plain or isinstance(weight.packed, Matrix))
    return x.dtype in INPUTS and is_taken


def integer_linear(
    x: torch.Tensor, weight: IntegerWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A static input is multiplied by 1 / scale: at a tie its code may be the other neighbour."""
    rows, matrix = x.reshape(-1, x.shape[-1]), matrix_of(weight)
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
    matrix = matrix_of(weight)
    is_packed = matrix.codes.dtype == torch.int32
    scale = matrix.scale if is_packed else matrix.scale.to(SCALES_OF_GROUPS[x.dtype])
    return _grouped_matmul(
        codes,
        matrix,
        counts,
        x.dtype,
        scale=[scale],
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


def _decoded_matrix_of(weight: WeightOnly) -> Matrix:
    return weight.packed or offset_matrix(weight, weight.codes)


def accepts_weight_only(
    x: torch.Tensor, weight: WeightOnly, rest: torch.Tensor | None = None
) -> bool:
    """int8 that the reference prepared are taken too."""
    of_groups = weight.group_size % 32 == 0 and weight.group_size > 0 and weight.codes.dim() == 2
    is_whole = weight.scale.shape[-1] == 1 or of_groups
    is_plain = weight.bits == 8 and weight.packed is None and is_whole
    is_taken = fits(weight.codes) and (is_plain or isinstance(weight.packed, Matrix))
    return x.dtype in INPUTS and is_taken


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
