"""Products of a few rows on CPU, summed in float32: memory is read once, no wider than it must be.

At the rows of a decode step a product takes the time that its weights take to arrive. A float32
weight whose values are all bfloat16's, as those of a checkpoint in bfloat16 are, is read as
bfloat16. More rows are oneDNN's.

A row's result does not depend on the rows beside it. Compiled code is kept on disk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sglang_ascend.ops.linear import onednn
from sglang_ascend.ops.linear.numba_dots import HAS_PAIRS, sum_products
from sglang_ascend.ops.linear.numba_tiles import (
    COLUMNS,
    MOST_GROUPS,
    ROWS,
    has_tiles,
    work_in_tiles,
)
from sglang_ascend.ops.linear.reference import PreparedWeight
from sglang_ascend.ops.numba_cache import cfunc, njit
from sglang_ascend.ops.numba_floats import array_at, narrow
from sglang_ascend.ops.numba_threads import num_threads, parallel_region, run_on_threads, take
from sglang_ascend.ops.numba_vectors import LANES

HAS_TILES = has_tiles()
# Beyond these oneDNN's blocks of a packed weight are as fast, by the dtype that it multiplies.
MOST_ROWS = {torch.float32: 16, torch.bfloat16: 6 if HAS_PAIRS else 2}
# The same of a float32 weight that is read as bfloat16. Without AVX-512 oneDNN is slower.
MOST_NARROW_ROWS = 16 if LANES == 16 else 32
# A weight as small as this, a router's of few experts, is multiplied by 64 rows in less time than
# oneDNN takes to be called.
SMALL = 1 << 12
# Rows of weights that a thread takes at a time.
PART = 32


accepts_weight = onednn.accepts_weight


def prepare(weight: torch.Tensor) -> PreparedWeight:
    """oneDNN's, and ``rows``, of which products of few rows are made here."""
    prepared, rows = onednn.prepare_packed(weight), _as_narrow_as_it_is(weight.detach())
    assert prepared.packed is not None
    if _are_multiplied_in_tiles(rows, weight.dtype) or rows.numel() <= SMALL:
        most_rows = MOST_GROUPS * ROWS
    else:
        is_read_narrower = rows.dtype != weight.dtype
        most_rows = MOST_NARROW_ROWS if is_read_narrower else MOST_ROWS[prepared.packed.dtype]
    return replace(prepared, rows=rows, most_rows=most_rows)


def _as_narrow_as_it_is(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.contiguous()
    if weight.dtype == torch.bfloat16:
        return weight
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.float(), weight) else weight


def _are_multiplied_in_tiles(rows: torch.Tensor, of_input: torch.dtype) -> bool:
    if not HAS_TILES or of_input != torch.bfloat16:
        return False
    out, width = rows.shape
    return out >= ROWS and width % COLUMNS == 0


def accepts_rows(x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None) -> bool:
    return _are_few(x, weight) or onednn.accepts_rows(x, weight, bias)


def _are_few(x: torch.Tensor, weight: PreparedWeight) -> bool:
    return x.dtype == weight.dense.dtype and 0 < x.numel() <= weight.most_rows * x.shape[-1]


def linear(
    x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if not _are_few(x, weight):
        return onednn.linear_packed(x, weight, bias)
    assert weight.rows is not None
    inputs, (out, width) = x.contiguous(), weight.rows.shape
    bias = None if bias is None else bias.detach().float()
    output = x.new_empty(*x.shape[:-1], out)
    multiply(
        weight.rows.data_ptr(),
        width * weight.rows.element_size(),
        out,
        width,
        inputs.data_ptr(),
        inputs.numel() // width,
        0 if bias is None else bias.data_ptr(),
        output.data_ptr(),
        work_of(weight, x.dtype),
        parallel_region(),
        num_threads(),
    )
    return output


def work_of(weight: PreparedWeight, of_input: torch.dtype) -> int:
    """The address of what multiplies inputs of this dtype by ``weight.rows``."""
    assert weight.rows is not None
    in_tiles = _are_multiplied_in_tiles(weight.rows, of_input)
    return (_IN_TILES if in_tiles else _WORK[weight.rows.dtype, of_input]).address


@njit(nogil=True, error_model="numpy")
def multiply(weights, of_row, out, width, inputs, num_rows, bias, output, work, region, threads):
    # The first is the rows of weights that threads have taken.
    job = np.array([0, weights, of_row, out, width, inputs, num_rows, bias, output], np.int64)
    run_on_threads(region, work, job.ctypes.data, min(threads, -(-out // PART)))
    return job[0]  # so that the job lives as long as the threads


@njit(error_model="numpy")
def _work(address, of_weight, of_input):
    """One thread's share: parts of the rows of weights, as they come."""
    job = array_at(address, (9,), np.int64(0))
    _, weights, of_row, out, width, inputs, num_rows, bias, output = job
    sums = np.empty((num_rows, PART), np.float32)
    rows = array_at(inputs, (num_rows, width), of_input)
    results = array_at(output, (num_rows, out), of_input)
    biases = array_at(bias, (out,), np.float32(0))
    while True:
        n = take(address, PART)
        if n >= out:
            return
        count, part = min(PART, out - n), weights + n * of_row
        sum_products((part, of_row, count), rows, of_weight, of_input, sums)
        for row in range(num_rows):
            if bias:
                for w in range(count):
                    results[row, n + w] = narrow(sums[row, w] + biases[n + w], of_input)
            else:
                for w in range(count):
                    results[row, n + w] = narrow(sums[row, w], of_input)


@cfunc("void(intp)")
def _float32_by_float32(job):
    _work(job, np.float32(0), np.float32(0))


@cfunc("void(intp)")
def _bfloat16_by_float32(job):
    _work(job, np.uint16(0), np.float32(0))


@cfunc("void(intp)")
def _bfloat16_by_bfloat16(job):
    _work(job, np.uint16(0), np.uint16(0))


def _bfloat16_in_tiles(job):
    work_in_tiles(job)


# Compiled where there are tiles alone: elsewhere LLVM has no such instructions.
_IN_TILES: Any = HAS_TILES and cfunc("void(intp)")(_bfloat16_in_tiles)
# By the dtypes of a weight's rows and of the input.
_WORK: dict[tuple[torch.dtype, torch.dtype], Any] = {
    (torch.float32, torch.float32): _float32_by_float32,
    (torch.bfloat16, torch.float32): _bfloat16_by_float32,
    (torch.bfloat16, torch.bfloat16): _bfloat16_by_bfloat16,
}
