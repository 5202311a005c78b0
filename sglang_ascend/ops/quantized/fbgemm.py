"""Integer products on CPU by fbgemm, which PyTorch for x86 has: for a CPU without Numba."""

from __future__ import annotations

import torch

from sglang_ascend.ops.quantized import integer
from sglang_ascend.ops.quantized.weights import IntegerWeight

# fbgemm takes the input unsigned; PyTorch quantizes it as round(x / scale) + zero point.
ZERO_POINT = 128


def is_available() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def accepts_codes(codes: torch.Tensor, scale: torch.Tensor, bits: int = 8, **options) -> bool:
    """One matrix of int8, one scale a channel, the input's scales of its rows."""
    has_static_input = options.get("input_scale") is not None
    return codes.dim() == 2 and bits == 8 and scale.shape[1] == 1 and not has_static_input


def prepare_integer(codes: torch.Tensor, scale: torch.Tensor, **options) -> IntegerWeight:
    """Packs a copy. Of ``options`` nothing but the defaults passes ``accepts_codes``."""
    weight = integer.prepare_integer(codes, scale, **options)
    ones, zeros = torch.ones(len(codes)).double(), torch.zeros(len(codes), dtype=torch.int64)
    of_channels = torch.ops.aten._make_per_channel_quantized_tensor
    packed = torch.ops.quantized.linear_prepack(of_channels(codes, ones, zeros, 0), None)
    return IntegerWeight(
        codes=codes.new_empty(len(codes), 0),
        scale=weight.scale,
        packed=packed,
        # The matrix, and for each of its rows their sum, scale and zero point.
        opaque_bytes=codes.numel() + 12 * len(codes),
        bits=8,
        width=weight.width,
        group_size=weight.group_size,
    )


def accepts_rows(x: torch.Tensor, weight: IntegerWeight, bias: torch.Tensor | None = None) -> bool:
    return weight.packed is not None


def integer_linear(
    x: torch.Tensor, weight: IntegerWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = weight.scale.shape[0]
    if not len(rows):
        return x.new_empty(*x.shape[:-1], out)
    codes, row_scale = integer.quantize_per_token(rows)
    product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        codes.float(), 1.0, ZERO_POINT, weight.packed
    )
    total = product * weight.scale[:, 0] * row_scale[:, None]
    if bias is not None:
        total = total + bias.float()
    return total.to(x.dtype).view(*x.shape[:-1], out)
