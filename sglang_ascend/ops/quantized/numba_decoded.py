"""Products of floats with decoded weights on CPU: a row of weights is decoded once for all rows.

What is decoded is a row of float32 that stays in the nearest cache, so that memory is read at the
width of the codes. Sums are in float32, in any order. Compiled code is kept on disk.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from sglang_ascend.ops.numba_cache import njit
from sglang_ascend.ops.numba_floats import FAST
from sglang_ascend.ops.quantized import fp8
from sglang_ascend.ops.quantized.weights import BlockFP8Weight, WeightOnly

NO_ZEROS, NO_BIAS = np.empty((0, 0), np.float32), np.empty(0, np.float32)
# 2^(127 - 7): from float32's bias of the exponent to E4M3's.
REBIAS = np.float32(2.0**120)


def weight_only_linear(
    x: torch.Tensor, weight: WeightOnly, bias: torch.Tensor | None = None
) -> torch.Tensor:
    rows = _rows(x, weight)
    out = weight.codes.shape[0]
    output = torch.empty(len(rows), out, dtype=torch.float32)
    zero = NO_ZEROS if weight.zero is None else weight.zero.numpy()
    of_bias = NO_BIAS if bias is None else bias.detach().float().numpy()
    _integers(rows.numpy(), *_arrays(weight), zero, of_bias, output.numpy())
    return output.to(x.dtype).view(*x.shape[:-1], out)


def grouped_weight_only_linear(
    x: torch.Tensor, weight: WeightOnly, counts: torch.Tensor
) -> torch.Tensor:
    rows = _rows(x, weight)
    output = torch.empty(len(rows), weight.codes.shape[1], dtype=torch.float32)
    codes, bits, starts, scale = _arrays(weight)
    for group, part in _groups(counts):
        zero = NO_ZEROS if weight.zero is None else weight.zero[group].numpy()
        matrix = codes[group], bits, starts, scale[group], zero
        _integers(rows[part].numpy(), *matrix, NO_BIAS, output[part].numpy())
    return output.to(x.dtype)


def block_fp8_linear(
    x: torch.Tensor, weight: BlockFP8Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    rows = _rounded(x, weight)
    out = weight.codes.shape[0]
    output = torch.empty(len(rows), out, dtype=torch.float32)
    codes = weight.codes.view(torch.uint8).numpy()
    of_bias = NO_BIAS if bias is None else bias.detach().float().numpy()
    matrix = codes, *weight.block, weight.scale.numpy()
    _e4m3(rows.numpy(), *matrix, of_bias, output.numpy())
    return output.to(x.dtype).view(*x.shape[:-1], out)


def grouped_block_fp8_linear(
    x: torch.Tensor, weight: BlockFP8Weight, counts: torch.Tensor
) -> torch.Tensor:
    rows = _rounded(x, weight)
    output = torch.empty(len(rows), weight.codes.shape[1], dtype=torch.float32)
    codes, scale = weight.codes.view(torch.uint8).numpy(), weight.scale.numpy()
    for group, part in _groups(counts):
        matrix = codes[group], *weight.block, scale[group]
        _e4m3(rows[part].numpy(), *matrix, NO_BIAS, output[part].numpy())
    return output.to(x.dtype)


def _groups(counts: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Of every group that has rows, its number and its rows."""
    start = 0
    for group, count in enumerate(counts.tolist()):
        if count:
            yield group, slice(start, start + count)
        start += count


def _rows(x: torch.Tensor, weight: WeightOnly) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).float()
    return (rows if weight.order is None else rows[:, weight.order]).contiguous()


def _rounded(x: torch.Tensor, weight: BlockFP8Weight) -> torch.Tensor:
    """The input's rows, or what they are worth in E4M3."""
    rows = x.reshape(-1, x.shape[-1]).float()
    if weight.quantizes_input:
        codes, scale = fp8.quantize_blocks(rows, weight.block[1])
        of_columns = scale.repeat_interleave(weight.block[1], dim=1)[:, : rows.shape[1]]
        rows = codes.float() * of_columns
    return rows.contiguous()


def _arrays(weight: WeightOnly) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
    codes = weight.codes.view(torch.int8).numpy()
    return codes, weight.bits, weight.starts.numpy(), weight.scale.numpy()


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def _integers(x, codes, bits, starts, scale, zero, bias, output):
    width = x.shape[1]
    values = np.empty(width, np.float32)
    for n in range(len(codes)):
        if bits == 4:
            packed = codes[n]
            below, above = values[: len(packed)], values[len(packed) :]
            for i in range(len(below)):
                below[i] = (packed[i] & np.int8(15)) - np.int8(8)
            for i in range(len(above)):
                above[i] = (packed[i] >> np.int8(4) & np.int8(15)) - np.int8(8)
        else:
            row = codes[n]
            for i in range(len(row)):
                values[i] = row[i]
        for group in range(scale.shape[1]):
            part, step = values[starts[group] : starts[group + 1]], scale[n, group]
            offset = zero[n, group] if len(zero) else np.float32(0)
            for i in range(len(part)):
                part[i] = (part[i] - offset) * step
        _dots(values, x, bias, n, output)


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def _e4m3(x, codes, block_rows, block_columns, scale, bias, output):
    width = x.shape[1]
    values = np.empty(width, np.float32)
    for n in range(len(codes)):
        for block in range(scale.shape[1]):
            start = block * block_columns
            row, part = codes[n, start : start + block_columns], values[start:]
            step = scale[n // block_rows, block]
            for i in range(len(row)):
                bits = np.uint32(row[i])
                size = np.uint32((bits & 0x7F) << 20).view(np.float32) * REBIAS
                size = np.float32(np.nan) if bits & 0x7F == 0x7F else size
                part[i] = (-size if bits & 0x80 else size) * step
        _dots(values, x, bias, n, output)


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def _dots(values, x, bias, n, output):
    """Column n of the output: a row of weights times every row of x, four at a time."""
    num_rows, width = x.shape
    shift = bias[n] if len(bias) else np.float32(0)
    row = 0
    while row + 4 <= num_rows:
        a, b, c, d = x[row], x[row + 1], x[row + 2], x[row + 3]
        first = second = third = fourth = np.float32(0)
        for i in range(width):
            value = values[i]
            first += value * a[i]
            second += value * b[i]
            third += value * c[i]
            fourth += value * d[i]
        output[row, n], output[row + 1, n] = first + shift, second + shift
        output[row + 2, n], output[row + 3, n] = third + shift, fourth + shift
        row += 4
    while row < num_rows:
        a = x[row]
        first = np.float32(0)
        for i in range(width):
            first += values[i] * a[i]
        output[row, n] = first + shift
        row += 1
