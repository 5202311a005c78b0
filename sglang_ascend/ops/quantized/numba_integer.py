"""Integer products on CPU by compiled loops: a few rows of weights are read once for all inputs.

Inputs are quantized into bytes, the products summed in int32, the rest is the definition's order of
float32 operations, so the results are its bits, whichever thread they come from. Compiled code is
kept on disk; its floats are float32 or the bits of bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_ascend.ops.numba_cache import cfunc, njit
from sglang_ascend.ops.numba_floats import array_at, narrow
from sglang_ascend.ops.numba_threads import num_threads, parallel_region, run_on_threads, take
from sglang_ascend.ops.quantized import integer
from sglang_ascend.ops.quantized.numba_dots import OFFSET, TILE, add_dots
from sglang_ascend.ops.quantized.numba_inputs import (
    contiguous_rows,
    places,
    quantize_into,
    scratch_of,
)
from sglang_ascend.ops.quantized.weights import IntegerWeight, unpack_nibbles

# Rows of weights that a thread takes at a time.
PART = 8 * TILE


class Matrix(NamedTuple):
    """What a product reads beside codes and scales; of several matrices the first is described."""

    # int32 [(groups,) out]: where the integer sum of a row begins. Those of many groups of columns
    # would take as much as their scales, so these are made by the product.
    starts: torch.Tensor
    # int64: addresses of codes, starts and scales; rows, columns, columns of a scale, bits;
    # addresses of a static input's scale and offset, or 0.
    description: torch.Tensor


def prepare_integer(codes: torch.Tensor, scale: torch.Tensor, **options: Any) -> IntegerWeight:
    """``packed`` is a ``Matrix``."""
    return _described(integer.prepare_integer(codes, scale, **options))


def _described(weight: IntegerWeight) -> IntegerWeight:
    """``weight`` with its ``Matrix``; the reference prepares none."""
    if weight.packed is not None:
        return weight
    codes = weight.codes if weight.bits == 8 else unpack_nibbles(weight.codes, weight.width)
    starts = -OFFSET * codes.sum(-1, dtype=torch.int32)
    if weight.quant_bias is not None:
        starts = starts + weight.quant_bias
    of_input = weight.input_scale, weight.input_offset
    description = [
        *(held.data_ptr() for held in (weight.codes, starts, weight.scale)),
        *(codes.shape[-2], weight.width, weight.group_size, weight.bits),
        *(0 if held is None else held.data_ptr() for held in of_input),
    ]
    matrix = Matrix(starts, torch.tensor(description))
    return replace(weight, packed=matrix, opaque_bytes=starts.nbytes)


def integer_linear(
    x: torch.Tensor, weight: IntegerWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    rows, weight, out = contiguous_rows(x), _described(weight), weight.codes.shape[0]
    output = torch.empty(*x.shape[:-1], out, dtype=rows.dtype)
    if not len(rows):
        return output.to(x.dtype)  # the loops begin with a first row
    bias = None if bias is None else bias.detach().float()
    of_bias = 0 if bias is None else bias.data_ptr()
    scratch = scratch_of(rows)
    _linear(
        *places(rows),
        scratch.data_ptr(),
        _matrix(weight),
        of_bias,
        output.data_ptr(),
        *_threads(x),
    )
    return output if output.dtype == x.dtype else output.to(x.dtype)


def grouped_integer_linear(
    x: torch.Tensor, weight: IntegerWeight, counts: torch.Tensor
) -> torch.Tensor:
    rows, weight, counts = contiguous_rows(x), _described(weight), counts.contiguous()
    output = torch.empty(len(rows), weight.codes.shape[1], dtype=rows.dtype)
    scratch = scratch_of(rows)
    groups = counts.data_ptr(), len(counts), output.element_size()
    _grouped_linear(
        *places(rows),
        scratch.data_ptr(),
        _matrix(weight),
        *groups,
        output.data_ptr(),
        *_threads(x),
    )
    return output.to(x.dtype)


def _matrix(weight: IntegerWeight) -> int:
    return weight.packed.description.data_ptr()


def _threads(x: torch.Tensor) -> tuple[int, int, int]:
    """What computes a thread's share in the dtype of the output, and where threads are entered."""
    work: Any = _work_bfloat16 if x.dtype == torch.bfloat16 else _work_float32
    return work.address, parallel_region(), num_threads()


@njit(nogil=True, error_model="numpy")
def _linear(
    address, num_rows, width, element, scratch, matrix, bias, output, work, region, threads
):
    static = array_at(matrix, (9,), np.int64(0))[7:]
    codes = quantize_into(scratch, address, num_rows, width, element, static[0], static[1])
    _multiply(num_rows, codes, scratch, matrix, bias, output, work, region, threads)


@njit(nogil=True, error_model="numpy")
def _grouped_linear(
    address,
    num_rows,
    width,
    element,
    scratch,
    matrix,
    counts,
    num_groups,
    element_size,
    output,
    work,
    region,
    threads,
):
    static = array_at(matrix, (9,), np.int64(0))[7:]
    codes = quantize_into(scratch, address, num_rows, width, element, static[0], static[1])
    of_group = array_at(matrix, (9,), np.int64(0)).copy()
    out, group_size, bits = of_group[3], of_group[5], of_group[6]
    stride = width if bits == 8 else -(-width // 2)
    row = 0
    for count in array_at(counts, (num_groups,), np.int64(0)):
        if count:
            inputs, scales = codes + row * width, scratch + 4 * row
            at = output + row * out * element_size
            of_matrix = np.int64(of_group.ctypes.data)
            _multiply(count, inputs, scales, of_matrix, 0, at, work, region, threads)
        row += count
        of_group[0] += out * stride
        of_group[1] += out * 4
        of_group[2] += out * -(-width // group_size) * 4


@njit(nogil=True, error_model="numpy")
def _multiply(num_rows, codes, row_scale, matrix, bias, output, work, region, threads):
    out = array_at(matrix, (9,), np.int64(0))[3]
    # The first is the rows of weights that threads have taken.
    job = np.array([0, num_rows, codes, row_scale, matrix, bias, output], np.int64)
    run_on_threads(region, work, job.ctypes.data, min(threads, -(-out // PART)))
    return job[0]  # so that the job lives as long as the threads


@njit(error_model="numpy")
def _work(address, element):
    """One thread's share: parts of the rows of weights, as they come."""
    _, num_rows, codes, row_scales, matrix, bias, output = array_at(address, (7,), np.int64(0))
    matrix = array_at(matrix, (9,), np.int64(0))
    out, width, group_size, bits = matrix[3:7]
    starts = array_at(matrix[1], (out,), np.int32(0))
    scale = array_at(matrix[2], (out, -(-width // group_size)), np.float32(0))
    stride = width if bits == 8 else -(-width // 2)
    unpacked = np.empty((PART if bits == 4 else 0, 2 * stride), np.int8)
    totals, sums = np.empty((num_rows, PART), np.int32), np.empty((num_rows, PART), np.float32)
    while True:
        n = take(address, PART)
        if n >= out:
            return
        count, weights, step = min(PART, out - n), matrix[0] + n * stride, stride
        if bits == 4:
            for w in range(count):
                _unpack(weights + w * stride, unpacked, w)
            weights, step = np.int64(unpacked.ctypes.data), 2 * stride
        part = starts[n : n + count], scale[n : n + count]
        _sum(weights, step, codes, width, group_size, *part, totals, sums)
        _store(sums, count, n, out, row_scales, bias, output, element)


@njit(error_model="numpy")
def _store(sums, count, n, out, row_scales, bias_address, address, element):
    """Columns n..n + count of the output."""
    num_rows = len(sums)
    row_scale = array_at(row_scales, (num_rows,), np.float32(0))
    bias = array_at(bias_address, (out,), np.float32(0))
    output = array_at(address, (num_rows, out), element)
    for row in range(num_rows):
        factor = row_scale[row]
        if bias_address:
            for w in range(count):
                value = sums[row, w] * factor + bias[n + w]
                output[row, n + w] = narrow(value, element)
        else:
            for w in range(count):
                output[row, n + w] = narrow(sums[row, w] * factor, element)


@njit(error_model="numpy")
def _unpack(address, unpacked, w):
    """Of ``weights.pack_nibbles``."""
    half = unpacked.shape[1] // 2
    packed = array_at(address, (half,), np.uint8(0))
    for i in range(half):
        unpacked[w, i] = np.int8(packed[i] & 15) - 8
    for i in range(half):
        unpacked[w, half + i] = np.int8(packed[i] >> 4) - 8


@njit(error_model="numpy")
def _sum(weights, stride, codes, width, group_size, starts, scale, totals, sums):
    """sums[row, w] of the rows of weights that ``starts`` and ``scale`` are of."""
    num_rows, (count, num_scales) = len(totals), scale.shape
    for group in range(num_scales):
        start = group * group_size
        stop = min(start + group_size, width)
        for w in range(count):
            begin = starts[w]
            if num_scales > 1:
                begin = _start(weights + w * stride + start, stop - start)
            totals[0, w] = begin
        for row in range(1, num_rows):
            totals[row, :count] = totals[0, :count]
        add_dots(weights, stride, count, codes, width, start, stop, totals)
        for row in range(num_rows):
            if group == 0:
                for w in range(count):
                    sums[row, w] = np.float32(totals[row, w]) * scale[w, group]
            else:
                for w in range(count):
                    sums[row, w] += np.float32(totals[row, w]) * scale[w, group]


@njit(error_model="numpy")
def _start(address, width):
    """Of a sum over inputs with the offset."""
    total = np.int32(0)
    for code in array_at(address, (width,), np.int8(0)):
        total += np.int32(code)
    return -np.int32(OFFSET) * total


@cfunc("void(intp)")
def _work_float32(job):
    _work(job, np.float32(0))


@cfunc("void(intp)")
def _work_bfloat16(job):
    _work(job, np.uint16(0))
