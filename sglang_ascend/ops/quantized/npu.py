"""Quantized products by torch_npu's fused operators.

Weights stay [out, in] in memory and are handed over transposed. int4 codes are packed by torch_npu
itself, eight to an int32.
"""

from __future__ import annotations

import torch

from sglang_ascend.ops.quantized import weight_only
from sglang_ascend.ops.quantized.weights import IntegerWeight, WeightOnly

# What npu_dynamic_quant and npu_weight_quant_batchmatmul take.
INPUTS = (torch.float16, torch.bfloat16)
COUNTS_OF_EXPERTS, ONE_RESULT, GROUPS_OF_ROWS = 1, 2, 0
LAST_AXIS = -1


def accepts_rows(x: torch.Tensor) -> bool:
    return x.dtype in INPUTS and x.dim() > 1


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.npu.npu_dynamic_quant(x)


def quantize_static(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Multiplies by 1 / scale: at a tie the code may be the other neighbour."""
    return torch.ops.npu.npu_quantize(x, 1 / scale, offset, torch.qint8, LAST_AXIS, False)


def accepts_integer(
    x: torch.Tensor, weight: IntegerWeight, bias: torch.Tensor | None = None
) -> bool:
    """int8, one scale a channel; the static form's float bias would be rounded apart."""
    is_static = weight.input_scale is not None
    fits = weight.bits == 8 and weight.scale.shape[-1] == 1
    return x.dtype in INPUTS and fits and not (is_static and bias is not None)


def integer_linear(
    x: torch.Tensor, weight: IntegerWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if weight.input_scale is None:
        codes, row_scale = quantize_per_token(rows)
    else:
        assert weight.input_offset is not None
        codes = quantize_static(rows, weight.input_scale, weight.input_offset)
        row_scale, bias = None, weight.quant_bias
    product = torch.ops.npu.npu_quant_matmul(
        codes,
        weight.codes.t(),
        weight.scale.flatten(),
        pertoken_scale=row_scale,
        bias=bias,
        output_dtype=x.dtype,
    )
    return product.view(*x.shape[:-1], product.shape[-1])


def accepts_groups(x: torch.Tensor, weight: IntegerWeight, counts: torch.Tensor) -> bool:
    """int8, one scale a channel."""
    return x.dtype in INPUTS and weight.bits == 8 and weight.scale.shape[-1] == 1


def grouped_integer_linear(
    x: torch.Tensor, weight: IntegerWeight, counts: torch.Tensor
) -> torch.Tensor:
    codes, row_scale = quantize_per_token(x)
    (product,) = torch.ops.npu.npu_grouped_matmul(
        [codes],
        [weight.codes.transpose(1, 2)],
        scale=[weight.scale.squeeze(2)],
        per_token_scale=[row_scale],
        group_list=counts,
        group_list_type=COUNTS_OF_EXPERTS,
        split_item=ONE_RESULT,
        group_type=GROUPS_OF_ROWS,
        output_dtype=x.dtype,
    )
    return product


def accepts_nibbles(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    bits: int = 8,
    **options,
) -> bool:
    """One matrix of int4, whose rows go into int32 in eights."""
    return bits == 4 and codes.dim() == 2 and len(codes) % 8 == 0


def prepare_weight_only(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, **options
) -> WeightOnly:
    weight = weight_only.prepare_weight_only(codes, scale, zero, **options)
    ordered = codes if weight.order is None else codes[:, weight.order]
    packed = torch.ops.npu.npu_convert_weight_to_int4pack(ordered.t().contiguous().int())
    return WeightOnly(
        codes=codes.new_empty(len(codes), 0),
        scale=weight.scale,
        packed=packed,
        bits=4,
        width=weight.width,
        group_size=weight.group_size,
        starts=weight.starts,
        zero=weight.zero,
        order=weight.order,
    )


def accepts_weight_only(
    x: torch.Tensor, weight: WeightOnly, bias: torch.Tensor | None = None
) -> bool:
    """Scales of channels, or of whole groups of 32 columns or a multiple."""
    of_channels = weight.scale.shape[-1] == 1
    of_groups = weight.group_size > 0 and weight.group_size % 32 == 0
    is_unpacked_nibble = weight.bits == 4 and weight.packed is None
    return x.dtype in INPUTS and (of_channels or of_groups) and not is_unpacked_nibble


def weight_only_linear(
    x: torch.Tensor, weight: WeightOnly, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """torch_npu adds its offset, value = (code + offset) * scale, so zeros go in negated; scales
    and offsets are of the input's dtype.
    """
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if weight.order is None else rows[:, weight.order]
    matrix = weight.codes.t() if weight.packed is None else weight.packed
    if bias is not None and x.dtype == torch.bfloat16:
        bias = bias.float()
    product = torch.ops.npu.npu_weight_quant_batchmatmul(
        rows,
        matrix,
        antiquant_scale=weight.scale.t().to(x.dtype),
        antiquant_offset=None if weight.zero is None else -weight.zero.t().to(x.dtype),
        bias=bias,
        antiquant_group_size=0 if weight.scale.shape[-1] == 1 else weight.group_size,
    )
    return product.view(*x.shape[:-1], product.shape[-1])
