"""Definition of the products of integers.

The integer sums are exact; what follows them is float32 in the order that is written here, so that
every body gives the same bits.
"""

from __future__ import annotations

import torch

from sglang_ascend.ops.quantized.weights import (
    IntegerWeight,
    check_codes,
    check_scale,
    pack_nibbles,
    unpack_nibbles,
)

INT8_MAX = 127
# A sum of so many products of int8 fits int32.
MAX_COLUMNS = (2**31 - 1) // (128 * 128)


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """round(x / scale) with scale = max|x| / 127 of each row, ties to even.

    Args:
        x: float [..., width].

    Returns:
        (int8 [..., width] in -127..127, float32 [...]). A row of zeros has scale 0 and codes 0; one
        with an infinity or NaN has such a scale. Does not synchronise.
    """
    wide = x.float()
    scale = wide.abs().amax(dim=-1) / INT8_MAX
    divisor = torch.where(scale == 0, 1.0, scale)[..., None]
    return (wide / divisor).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def quantize_static(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """round(x / scale + offset), ties to even, in -128..127: int8 in the shape of ``x``.

    Args:
        x: float [..., width].
        scale, offset: float32 [1]. Does not synchronise.
    """
    codes = (x.float() / scale + offset).round()
    return codes.clamp(-INT8_MAX - 1, INT8_MAX).to(torch.int8)


def prepare_integer(
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    bits: int = 8,
    group_size: int | None = None,
    input_scale: torch.Tensor | None = None,
    input_offset: torch.Tensor | None = None,
    quant_bias: torch.Tensor | None = None,
) -> IntegerWeight:
    """A weight for ``integer_linear``, or with groups in front for ``grouped_integer_linear``.

    Args:
        codes: int8 [(groups,) out, in], within ``bits`` (8 or 4).
        scale: float32 [(groups,) out, ceil(in / group_size)]; the static form's is what takes the
            integer sum to the output (ModelSlim's deq_scale = weight scale * input scale).
        group_size: columns that one scale covers, None for all; the last may cover fewer.
        input_scale, input_offset: float32 [1], of the static form; None quantizes by row.
        quant_bias: int32 [out], of the static form (ModelSlim's, which undoes the offset).

    Raises:
        ValueError: these do not fit each other.
    """
    width = codes.shape[-1]
    group_size = group_size or width
    check_codes(codes, bits)
    check_scale(scale, (*codes.shape[:-1], -(-width // group_size)))
    if width > MAX_COLUMNS:
        raise ValueError(f"an int32 sum has at most {MAX_COLUMNS} products of int8, not {width}.")
    is_static = input_scale is not None
    if is_static and (codes.dim() > 2 or scale.shape[-1] > 1):
        raise ValueError("a static input scale goes with one matrix, one scale a channel.")
    if (input_offset is not None or quant_bias is not None) and not is_static:
        raise ValueError("input_offset and quant_bias belong to a static input_scale.")
    if is_static and input_offset is None:
        input_offset = torch.zeros_like(input_scale)
    return IntegerWeight(
        codes=codes.contiguous() if bits == 8 else pack_nibbles(codes),
        scale=scale.contiguous(),
        bits=bits,
        width=width,
        group_size=group_size,
        input_scale=input_scale,
        input_offset=input_offset,
        quant_bias=quant_bias,
    )


def integer_linear(
    x: torch.Tensor, weight: IntegerWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Integer products of the quantized input and the weight's codes, scaled.

        per token:  y = sum_g (q_g W_g^T) * scale_g * row_scale + b,   q = quantize_per_token(x)
        static:     y = (q W^T + quant_bias) * scale + b,              q = quantize_static(x)

    The sum over groups of columns runs in their order.

    Args:
        x: float [..., in].
        weight: what ``prepare_integer`` returned on this device.
        bias: [out], or None.

    Returns:
        [..., out] in the dtype of ``x``, rounded once. Does not synchronise.
    """
    rows = x.reshape(-1, x.shape[-1])
    if weight.input_scale is None:
        codes, row_scale = quantize_per_token(rows)
        total = _scaled_sum(codes, weight, weight.codes, weight.scale) * row_scale[:, None]
    else:
        assert weight.input_offset is not None  # set beside the scale
        codes = quantize_static(rows, weight.input_scale, weight.input_offset)
        total = _scaled_sum(codes, weight, weight.codes, weight.scale)
    if bias is not None:
        total = total + bias.float()
    return total.to(x.dtype).reshape(*x.shape[:-1], total.shape[1])


def grouped_integer_linear(
    x: torch.Tensor, weight: IntegerWeight, counts: torch.Tensor
) -> torch.Tensor:
    """``integer_linear`` (per token) of each group of rows with the group's own matrix.

    Args:
        x: float [rows, in], group by group, as ``experts.permute`` leaves them.
        weight: of groups, from ``prepare_integer`` on this device.
        counts: int64 [groups], rows of each; their sum is rows.

    Returns:
        [rows, out] in the dtype of ``x``. This body reads ``counts`` on the host; an implementation
        for a device must not.
    """
    codes, row_scale = quantize_per_token(x)
    parts = [
        _scaled_sum(rows, weight, matrix, scale)
        for rows, matrix, scale in zip(
            codes.split(counts.tolist()), weight.codes, weight.scale, strict=True
        )
    ]
    return (torch.cat(parts) * row_scale[:, None]).to(x.dtype)


def _scaled_sum(
    codes: torch.Tensor, weight: IntegerWeight, matrix: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """float32 [rows, out]; float64 holds the integer sums without error."""
    matrix = matrix if weight.bits == 8 else unpack_nibbles(matrix, weight.width)
    total = torch.zeros(len(codes), len(matrix), dtype=torch.float32, device=codes.device)
    for index, start in enumerate(range(0, weight.width, weight.group_size)):
        columns = slice(start, start + weight.group_size)
        product = codes[:, columns].double() @ matrix[:, columns].double().T
        if weight.quant_bias is not None:
            product = product + weight.quant_bias.double()
        total = total + product.float() * scale[:, index]
    return total
