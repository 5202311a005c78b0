"""Products of a few rows on CPU, in float32: memory is read once, and no wider than it must be.

At the rows of a decode step a product takes the time that its weights take to arrive. A float32
weight whose values are all bfloat16's, as those of a checkpoint in bfloat16 are, is read as
bfloat16. More rows are oneDNN's.

A row's result does not depend on the rows beside it. Compiled code is kept on disk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numba
import numpy as np
import torch

from sglang_ascend.ops.linear import onednn
from sglang_ascend.ops.linear.numba_dots import (
    INPUTS,
    WEIGHTS,
    dots_of_four_inputs,
    dots_of_input,
    dots_of_pair,
    dots_of_three_inputs,
    dots_of_two_inputs,
)
from sglang_ascend.ops.linear.reference import PreparedWeight
from sglang_ascend.ops.numba_floats import array_at, widen
from sglang_ascend.ops.numba_threads import num_threads, parallel_region, run_on_threads, take
from sglang_ascend.ops.numba_vectors import LANES

# Beyond these oneDNN's blocks of a packed weight are as fast, of bfloat16 sooner.
MOST_ROWS = {torch.float32: 16, torch.bfloat16: 2}
# Rows of weights that a thread takes at a time.
PART = 32


accepts_weight = onednn.accepts_weight


def prepare(weight: torch.Tensor) -> PreparedWeight:
    """oneDNN's, and ``rows``, of which products of few rows are made here."""
    return replace(onednn.prepare_packed(weight), rows=_as_narrow_as_it_is(weight.detach()))


def _as_narrow_as_it_is(weight: torch.Tensor) -> torch.Tensor:
    if weight.dtype == torch.bfloat16:
        return weight.contiguous()
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.float(), weight) else weight.contiguous()


def accepts_rows(x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None) -> bool:
    return _are_few(x, weight) or onednn.accepts_rows(x, weight, bias)


def _are_few(x: torch.Tensor, weight: PreparedWeight) -> bool:
    if weight.rows is None or weight.packed is None or x.dtype != weight.dense.dtype:
        return False
    return 0 < x.numel() <= MOST_ROWS[weight.packed.dtype] * x.shape[-1]


def linear(
    x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if not _are_few(x, weight):
        return onednn.linear_packed(x, weight, bias)
    assert weight.rows is not None
    inputs, (out, width) = x.float().contiguous(), weight.rows.shape
    bias = None if bias is None else bias.detach().float()
    output = torch.empty(*x.shape[:-1], out)
    work: Any = _work_bfloat16 if weight.rows.dtype == torch.bfloat16 else _work_float32
    _multiply(
        weight.rows.data_ptr(),
        width * weight.rows.element_size(),
        out,
        width,
        inputs.data_ptr(),
        inputs.numel() // width,
        0 if bias is None else bias.data_ptr(),
        output.data_ptr(),
        work.address,
        parallel_region(),
        num_threads(),
    )
    return output if x.dtype == torch.float32 else output.to(x.dtype)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _multiply(weights, of_row, out, width, inputs, num_rows, bias, output, work, region, threads):
    # The first is the rows of weights that threads have taken.
    job = np.array([0, weights, of_row, out, width, inputs, num_rows, bias, output], np.int64)
    run_on_threads(region, work, job.ctypes.data, min(threads, -(-out // PART)))
    return job[0]  # so that the job lives as long as the threads


@numba.njit(cache=True, error_model="numpy")
def _work(address, element):
    """One thread's share: parts of the rows of weights, as they come."""
    job = array_at(address, (9,), np.int64(0))
    _, weights, of_row, out, width, inputs, num_rows, bias, output = job
    while True:
        n = take(address, PART)
        if n >= out:
            return
        count = min(PART, out - n)
        part = weights + n * of_row
        _dots(part, of_row, count, width, inputs, num_rows, output + 4 * n, out, element)
        _add_rest(part, count, width, inputs, num_rows, bias, output, n, out, element)


@numba.njit(cache=True, error_model="numpy")
def _dots(weights, of_row, count, width, inputs, num_rows, output, out, element):
    """Of the columns that fill vectors: rows of weights that are in a cache, times all inputs."""
    n = 0
    while n < count:
        num_weights, row = (WEIGHTS if n + WEIGHTS <= count else 1), 0
        while row < num_rows:
            num_inputs = min(INPUTS, num_rows - row) if num_weights == WEIGHTS else 1
            x, at = inputs + 4 * row * width, output + 4 * (row * out + n)
            if num_weights == 1:
                dots_of_pair(element, weights, x, width, at, out)
            elif num_inputs == 1:
                dots_of_input(element, weights, x, width, at, out)
            elif num_inputs == 2:
                dots_of_two_inputs(element, weights, x, width, at, out)
            elif num_inputs == 3:
                dots_of_three_inputs(element, weights, x, width, at, out)
            else:
                dots_of_four_inputs(element, weights, x, width, at, out)
            row += num_inputs
        weights += num_weights * of_row
        n += num_weights


@numba.njit(cache=True, error_model="numpy")
def _add_rest(weights, count, width, inputs, num_rows, bias, output, n, out, element):
    """The columns behind the vectors, and the bias, to columns n.. of the output."""
    start = width // LANES * LANES
    if start == width and not bias:
        return
    matrix = array_at(weights, (count, width), element)
    rows = array_at(inputs, (num_rows, width), np.float32(0))
    sums = array_at(output, (num_rows, out), np.float32(0))
    biases = array_at(bias, (out,), np.float32(0))
    for row in range(num_rows):
        for w in range(count):
            total = sums[row, n + w]
            for i in range(start, width):
                total += widen(matrix[w, i]) * rows[row, i]
            sums[row, n + w] = total + biases[n + w] if bias else total


@numba.cfunc("void(intp)", cache=True)
def _work_float32(job):
    _work(job, np.float32(0))


@numba.cfunc("void(intp)", cache=True)
def _work_bfloat16(job):
    _work(job, np.uint16(0))
