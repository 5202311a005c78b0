"""Dynamic int8 quantization of activations, and the matrix product of quantized operands."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulation.goldens.registry import golden

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
def dynamic_quant(input: Tensor, smooth_scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(round(x / s) int8, s float32 per row) with s = max|x| / 127, after x * smooth_scales."""
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
