"""Dynamic int8 quantization of activations, and the matrix product of quantized operands."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulation.goldens.registry import UnsupportedArgumentError, golden

INT8_MAX = 127
# torch_npu takes result types by their number in c10::ScalarType.
SCALAR_TYPES = {
    1: torch.int8,
    3: torch.int32,
    5: torch.float16,
    6: torch.float32,
    15: torch.bfloat16,
}


@golden("npu::npu_dynamic_quant")
def dynamic_quant(
    input: Tensor, smooth_scales: Tensor | None = None, dst_type: int | None = None
) -> tuple[Tensor, Tensor]:
    """(round(x / s) int8, s float32 per row) with s = max|x| / 127, after x * smooth_scales."""
    if dst_type not in (None, 1):
        raise UnsupportedArgumentError("npu_dynamic_quant is emulated for int8.")
    x = input.float() if smooth_scales is None else input.float() * smooth_scales.float()
    scale = x.abs().amax(-1) / INT8_MAX
    divisor = torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    return (x / divisor).round().clamp(-INT8_MAX - 1, INT8_MAX).to(torch.int8), scale


@golden("npu::npu_quant_matmul")
def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
) -> Tensor:
    """x1 [..., m, k] int8 times x2 [..., k, n] int8, times scale [n] or [1] and pertoken_scale [m].

    An int32 bias joins the integer sum, a float one the result; offset is of an int8 result.
    """
    total = torch.matmul(x1.double(), x2.double())  # exact: below 2^53
    if bias is not None and bias.dtype == torch.int32:
        total = total + bias.double()
    result = total.float() * scale.float()
    if pertoken_scale is not None:
        result = result * pertoken_scale.float().unsqueeze(-1)
    if bias is not None and bias.dtype != torch.int32:
        result = result + bias.float()
    dtype = SCALAR_TYPES[1 if output_dtype is None else output_dtype]
    if dtype == torch.int8:
        result = (result if offset is None else result + offset.float()).round()
        result = result.clamp(-INT8_MAX - 1, INT8_MAX)
    return result.to(dtype)


@golden("npu::npu_quantize")
def quantize(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: torch.dtype | int,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    """round(input * scales + zero_points) as int8, for div_mode False, of the last axis."""
    if div_mode or axis == -2:
        raise UnsupportedArgumentError("npu_quantize is emulated for div_mode=False, last axis.")
    result = input.float() * scales.float()
    if zero_points is not None:
        result = result + zero_points.float()
    return result.round().clamp(-INT8_MAX - 1, INT8_MAX).to(torch.int8)


@golden("npu::npu_dequant_swiglu_quant")
def dequant_swiglu_quant(
    x: Tensor, activate_left: bool = False, quant_mode: int = 0
) -> tuple[Tensor, Tensor]:
    """``dynamic_quant`` of swish(one half) * the other half, which is not rounded in between."""
    if quant_mode != 1 or x.dtype == torch.int32:
        raise UnsupportedArgumentError(
            "npu_dequant_swiglu_quant is emulated for floats, quantized dynamically."
        )
    left, right = x.float().chunk(2, -1)
    gate, up = (left, right) if activate_left else (right, left)
    return dynamic_quant(torch.nn.functional.silu(gate) * up)


@golden("npu::npu_convert_weight_to_int4pack")
def convert_weight_to_int4pack(weight: Tensor) -> Tensor:
    """Eight neighbours of the last dimension to an int32, the first in its lowest four bits."""
    nibbles = (weight & 15).long().unflatten(-1, (-1, 8))
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def integers(weight: Tensor) -> Tensor:
    """The codes of a weight [..., k, n], of which an int32 holds eight int4."""
    if weight.dtype != torch.int32:
        return weight
    nibbles = (weight[..., None] >> torch.arange(0, 32, 4)) & 15
    return ((nibbles ^ 8) - 8).flatten(-2)


@golden("npu::npu_weight_quant_batchmatmul")
def weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
) -> Tensor:
    """x @ ((weight + offset) * scale) + bias; weight [k, n] int8, or int32 of eight int4 each."""
    values = integers(weight).float()
    groups = torch.arange(len(values)) // (antiquant_group_size or len(values))
    if antiquant_offset is not None:
        values = values + antiquant_offset.float().reshape(-1, values.shape[1])[groups]
    values = values * antiquant_scale.float().reshape(-1, values.shape[1])[groups]
    product = x.float() @ values
    return (product if bias is None else product + bias.float()).to(x.dtype)
