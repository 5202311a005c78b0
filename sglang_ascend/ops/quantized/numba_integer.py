"""Integer products on CPU, one compiled loop each: a row of weights is read once for all rows.

Inputs are quantized into bytes, the products summed in int32, the rest is the definition's order of
float32 operations, so the results are its bits. Compiled code is kept on disk; its floats are
float32 or the bits of bfloat16.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from sglang_ascend.ops.numba_floats import FLOATS, as_array, narrow, widen
from sglang_ascend.ops.quantized.numba_dots import (
    BLOCK,
    HAS_VNNI,
    SHIFT,
    TILE,
    dots_of_row,
    dots_of_tile,
)
from sglang_ascend.ops.quantized.weights import IntegerWeight

# What the input's codes are stored with: the vector product takes them unsigned.
OFFSET = SHIFT if HAS_VNNI else 0
CODE = np.uint8 if HAS_VNNI else np.int8
# Added to a number below 2^22, it leaves the nearest integer (ties to even) in the low bits.
TO_INTEGER = np.float32(1.5 * 2**23)
INTEGER_BITS = np.int32(0x4B400000)
NO_BIAS, NO_INTEGERS = np.empty(0, np.float32), np.empty(0, np.int32)


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _rows(x)
    codes = torch.empty(rows.shape, dtype=torch.int8)
    scale = torch.empty(len(rows), dtype=torch.float32)
    _quantize_rows(as_array(rows), codes.numpy(), scale.numpy(), 0)
    return codes.view(x.shape), scale.view(x.shape[:-1])


def quantize_static(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    rows = _rows(x)
    codes = torch.empty(rows.shape, dtype=torch.int8)
    _quantize_all(as_array(rows), scale.numpy(), offset.numpy(), codes.numpy(), 0)
    return codes.view(x.shape)


def integer_linear(
    x: torch.Tensor, weight: IntegerWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    rows = _rows(x)
    out = weight.codes.shape[0]
    codes, row_scale = _quantized(rows, weight)
    output = torch.empty(len(rows), out, dtype=rows.dtype)
    _multiply(
        codes,
        row_scale,
        weight.codes.view(torch.int8).numpy(),
        weight.bits,
        weight.scale.numpy(),
        weight.group_size,
        NO_INTEGERS if weight.quant_bias is None else weight.quant_bias.numpy(),
        NO_BIAS if bias is None else bias.detach().float().numpy(),
        as_array(output),
    )
    return output.to(x.dtype).view(*x.shape[:-1], out)


def grouped_integer_linear(
    x: torch.Tensor, weight: IntegerWeight, counts: torch.Tensor
) -> torch.Tensor:
    rows = _rows(x)
    codes, row_scale = _quantized(rows, weight)
    output = torch.empty(len(rows), weight.codes.shape[1], dtype=rows.dtype)
    _multiply_groups(
        codes,
        row_scale,
        weight.codes.view(torch.int8).numpy(),
        weight.bits,
        weight.scale.numpy(),
        weight.group_size,
        counts.numpy(),
        as_array(output),
    )
    return output.to(x.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return rows if x.dtype in FLOATS else rows.float()


def _quantized(rows: torch.Tensor, weight: IntegerWeight) -> tuple[np.ndarray, np.ndarray]:
    """Codes as the products take them, and the scale of each row."""
    codes, scale = np.empty(rows.shape, CODE), np.ones(len(rows), np.float32)
    if weight.input_scale is None:
        _quantize_rows(as_array(rows), codes, scale, OFFSET)
    else:
        assert weight.input_offset is not None
        static = weight.input_scale.numpy(), weight.input_offset.numpy()
        _quantize_all(as_array(rows), *static, codes, OFFSET)
    return codes, scale


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _quantize_rows(x, codes, scale, offset):
    """The largest is looked for among the bits, in which NaN is above infinity and so is kept."""
    num_rows, width = x.shape
    for row in range(num_rows):
        largest = np.int32(0)
        for d in range(width):
            bits = np.float32(widen(x[row, d])).view(np.int32) & np.int32(0x7FFFFFFF)
            largest = max(largest, np.int32(bits))
        step = np.int32(largest).view(np.float32) / np.float32(127)
        scale[row] = step
        divisor = np.float32(1) if step == 0 else step
        for d in range(width):
            value = widen(x[row, d]) / divisor
            value = min(max(value, np.float32(-127)), np.float32(127))
            bits = np.float32(value + TO_INTEGER).view(np.int32)
            codes[row, d] = bits - INTEGER_BITS + offset


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _quantize_all(x, scale, input_offset, codes, offset):
    num_rows, width = x.shape
    step, shift = scale[0], input_offset[0]
    for row in range(num_rows):
        for d in range(width):
            value = widen(x[row, d]) / step + shift
            value = min(max(value, np.float32(-128)), np.float32(127))
            bits = np.float32(value + TO_INTEGER).view(np.int32)
            codes[row, d] = bits - INTEGER_BITS + offset


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _multiply(codes, row_scale, weights, bits, scale, group_size, quant_bias, bias, output):
    num_rows, width = codes.shape
    num_groups = scale.shape[1]
    unpacked = np.empty(width, np.int8)
    totals = np.empty(num_rows, np.int32)
    sums = np.empty(num_rows, np.float32)
    for n in range(len(weights)):
        matrix_row = weights[n]
        if bits == 4:
            _unpack(weights[n], unpacked)
            matrix_row = unpacked
        for group in range(num_groups):
            start = group * group_size
            _dots(matrix_row, codes, start, min(start + group_size, width), totals)
            for row in range(num_rows):
                total = totals[row]
                if len(quant_bias):
                    total += quant_bias[n]
                product = np.float32(total) * scale[n, group]
                sums[row] = product if group == 0 else sums[row] + product
        for row in range(num_rows):
            value = sums[row] * row_scale[row]
            if len(bias):
                value += bias[n]
            output[row, n] = narrow(value, output[row, n])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _multiply_groups(codes, row_scale, weights, bits, scale, group_size, counts, output):
    start = 0
    for group in range(len(counts)):
        rows = slice(start, start + counts[group])
        if counts[group]:
            _multiply(
                codes[rows],
                row_scale[rows],
                weights[group],
                bits,
                scale[group],
                group_size,
                NO_INTEGERS,
                NO_BIAS,
                output[rows],
            )
        start += counts[group]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _unpack(packed, codes):
    """Of ``weights.pack_nibbles``."""
    below, above = codes[: len(packed)], codes[len(packed) :]
    for i in range(len(below)):
        below[i] = (packed[i] & np.int8(15)) - np.int8(8)
    for i in range(len(above)):
        above[i] = (packed[i] >> np.int8(4) & np.int8(15)) - np.int8(8)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _dots(weights, codes, start, stop, totals):
    """int32 [rows]: the sums of products over columns start..stop, in vectors as far as they go."""
    num_rows, stride = codes.shape
    blocks = (stop - start) // BLOCK if HAS_VNNI else 0
    rest = start + blocks * BLOCK
    row = 0
    if blocks:
        at_weights = weights.ctypes.data + start
        at_codes, at_totals = codes.ctypes.data + start, totals.ctypes.data
        while row + TILE <= num_rows:
            dots_of_tile(at_weights, at_codes + row * stride, stride, blocks, at_totals + 4 * row)
            row += TILE
        while row < num_rows:
            dots_of_row(at_weights, at_codes + row * stride, stride, blocks, at_totals + 4 * row)
            row += 1
    else:
        totals[:] = 0
    if rest < stop:
        for row in range(num_rows):
            totals[row] += _dot(weights[rest:stop], codes[row, rest:stop])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _dot(weights, codes):
    total = np.int32(0)
    for d in range(len(weights)):
        total = np.int32(total + np.int32(weights[d]) * (np.int32(codes[d]) - np.int32(OFFSET)))
    return total
