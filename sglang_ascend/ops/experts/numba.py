"""The mixture-of-experts operators on CPU, compiled by Numba: experts' weights are read where they
lie, once for all rows of a group, and by no expert without rows.

A few rows go to as many experts: PyTorch spends more on its calls for each than on their products.
Compiled code is kept on disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_ascend.ops.linear.numba import MOST_ROWS as MOST_ROWS_OF_WEIGHT
from sglang_ascend.ops.linear.numba_dots import sum_products
from sglang_ascend.ops.numba_cache import cfunc, njit
from sglang_ascend.ops.numba_floats import FAST, FLOATS, array_at, narrow, widen
from sglang_ascend.ops.numba_threads import num_threads, parallel_region, run_on_threads, take

# Rows of all groups, of a group on average, and its products up to which PyTorch's call for each
# group, which packs its weights, takes longer. Of a group so few that they stay in a cache.
MOST_ROWS, MOST_PRODUCTS = 32, 1 << 21
# Rows of weights that a thread takes at a time, and products for which one more is worth its start.
PART, PRODUCTS_OF_THREAD = 64, 1 << 18
# Numbers that describe to the threads what is multiplied.
NUM_PARTS = 9


def accepts_rows(x: torch.Tensor, experts: torch.Tensor, *, num_experts: int) -> bool:
    """As ``gating`` returns them."""
    return experts.dtype == torch.int32 and experts.is_contiguous() and x.is_contiguous()


def permute(
    x: torch.Tensor, experts: torch.Tensor, *, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, k = experts.shape
    copies = x.new_empty(num_rows * k, x.shape[1])
    places = torch.empty(num_rows * k, dtype=torch.int32)
    counts = torch.empty(num_experts, dtype=torch.int64)
    copy_to_experts(
        (x.data_ptr(), x.shape[1] * x.element_size(), copies.data_ptr()),
        (experts.data_ptr(), num_rows, k, num_experts),
        (places.data_ptr(), counts.data_ptr()),
    )
    return copies, places, counts


def accepts_groups(x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> bool:
    """float32 or bfloat16; matrices that lie transposed, as checkpoints have them; few rows, or few
    products, of a group on average."""
    return (
        x.dtype in FLOATS
        and x.dtype == weights.dtype
        and (len(x) <= MOST_ROWS or len(x) <= len(weights) * _most_rows_of_group(weights))
        and x.is_contiguous()
        and weights.mT.is_contiguous()
        and counts.is_contiguous()
    )


def _most_rows_of_group(weights: torch.Tensor) -> int:
    _, width, out = weights.shape
    return max(MOST_ROWS_OF_WEIGHT[weights.dtype], MOST_PRODUCTS // (width * out))


def grouped_matmul(x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    num_groups, width, out = weights.shape
    output = x.new_empty(len(x), out)
    multiply_groups(
        (x.data_ptr(), len(x), width),
        (weights.data_ptr(), counts.data_ptr(), num_groups, out),
        output.data_ptr(),
        (work_of(x.dtype), parallel_region(), num_threads()),
    )
    return output


def work_of(dtype: torch.dtype) -> int:
    """The address of what multiplies rows of this dtype."""
    work: Any = _work_bfloat16 if dtype == torch.bfloat16 else _work_float32
    return work.address


def accepts_copies(copies: torch.Tensor, weights: torch.Tensor, places: torch.Tensor) -> bool:
    """float32 or bfloat16, contiguous."""
    return (
        copies.dtype in FLOATS
        and weights.dtype in FLOATS
        and copies.is_contiguous()
        and weights.is_contiguous()
        and places.is_contiguous()
    )


def unpermute(copies: torch.Tensor, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    num_rows, k = weights.shape
    output = copies.new_empty(num_rows, copies.shape[1])
    sum_of_experts(
        (copies.data_ptr(), weights.data_ptr(), places.data_ptr(), output.data_ptr()),
        (num_rows, k, copies.shape[1]),
        FLOATS[copies.dtype],
        FLOATS[weights.dtype],
    )
    return output


@njit(nogil=True, error_model="numpy")
def copy_to_experts(rows, choices, results):
    address, num_bytes, copies = rows
    experts, num_rows, k, num_experts = choices
    x = array_at(address, (num_rows, num_bytes), np.uint8(0))
    copies = array_at(copies, (num_rows * k, num_bytes), np.uint8(0))
    experts = array_at(experts, (num_rows * k,), np.int32(0))
    places = array_at(results[0], (num_rows * k,), np.int32(0))
    counts = array_at(results[1], (num_experts,), np.int64(0))
    counts[:] = 0
    for i in range(num_rows * k):
        counts[experts[i]] += 1
    next_place = np.cumsum(counts) - counts
    for i in range(num_rows * k):
        place: Any = next_place[experts[i]]
        next_place[experts[i]] += 1
        places[i] = place
        copies[place] = x[i // k]


@njit(nogil=True, error_model="numpy")
def multiply_groups(rows, groups, output, threads):
    work, region, num_threads = threads
    _, num_rows, width = rows
    out = groups[3]
    # The first is the parts of all matrices that threads have taken.
    described = (0, *rows, *groups, output)
    job = np.empty(NUM_PARTS, np.int64)
    for n in range(NUM_PARTS):
        job[n] = described[n]
    worthwhile = 1 + num_rows * width * out // PRODUCTS_OF_THREAD
    run_on_threads(region, work, job.ctypes.data, min(num_threads, worthwhile))
    return job[0]  # so that the job lives as long as the threads


@njit(error_model="numpy")
def _work(address, element):
    """One thread's share: parts of the matrices of groups that have rows, as they come."""
    _, x, num_rows, width, weights, counts, num_groups, out, output = array_at(
        address, (NUM_PARTS,), np.int64(0)
    )
    x = array_at(x, (num_rows, width), element)
    counts = array_at(counts, (num_groups,), np.int64(0))
    output = array_at(output, (num_rows, out), element)
    sums = np.empty((counts.max(), PART), np.float32)
    parts, of_row = -(-out // PART), width * x.itemsize
    group, start = 0, 0
    while True:
        taken = take(address, 1)
        if taken >= num_groups * parts:
            return
        while group < taken // parts:
            start += counts[group]
            group += 1
        rows = x[start : start + counts[group]]
        first = taken % parts * PART
        part = weights + (group * out + first) * of_row, of_row, min(PART, out - first)
        sum_products(part, rows, element, element, sums)
        for row in range(len(rows)):
            for n in range(part[2]):
                output[start + row, first + n] = narrow(sums[row, n], element)


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def sum_of_experts(addresses, sizes, element, weight):
    num_rows, k, width = sizes
    copies = array_at(addresses[0], (num_rows * k, width), element)
    weights = array_at(addresses[1], (num_rows, k), weight)
    places = array_at(addresses[2], (num_rows, k), np.int32(0))
    output = array_at(addresses[3], (num_rows, width), element)
    total = np.empty(width, np.float32)
    for row in range(num_rows):
        total[:] = 0
        for j in range(k):
            share, copy = widen(weights[row, j]), copies[places[row, j]]
            for i in range(width):
                total[i] += share * widen(copy[i])
        for i in range(width):
            output[row, i] = narrow(total[i], element)


@cfunc("void(intp)")
def _work_float32(job):
    _work(job, np.float32(0))


@cfunc("void(intp)")
def _work_bfloat16(job):
    _work(job, np.uint16(0))
