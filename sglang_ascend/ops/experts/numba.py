"""The mixture-of-experts operators on CPU, compiled by Numba: experts' weights are read where they
lie, once for all rows of a group, and by no expert without rows.

A few rows go to as many experts: PyTorch spends more on its calls for each than on their products.
Compiled code is kept on disk.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from sglang_ascend.ops.numba_floats import FAST, FLOATS, array_at, exp, narrow, widen
from sglang_ascend.ops.numba_threads import num_threads, parallel_region, run_on_threads, take

# Rows of all groups up to which a row of weights is read from memory longer than it is multiplied:
# with more, PyTorch's products of blocks win.
MOST_ROWS = 32
# Rows of weights that a thread takes at a time, and products for which one more is worth its start.
PART, PRODUCTS_OF_THREAD = 64, 1 << 18
# Numbers that describe to the threads what is multiplied.
NUM_PARTS = 9


def accepts_scores(scores: torch.Tensor, bias: torch.Tensor, **sizes: Any) -> bool:
    """float32 or bfloat16, contiguous."""
    return (
        scores.dtype in FLOATS
        and scores.dtype == bias.dtype
        and scores.is_contiguous()
        and bias.is_contiguous()
    )


def gating(
    scores: torch.Tensor,
    bias: torch.Tensor,
    *,
    num_experts_per_token: int,
    num_groups: int,
    num_kept_groups: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_experts = scores.shape
    weights = scores.new_empty(num_rows, num_experts_per_token)
    experts = torch.empty(num_rows, num_experts_per_token, dtype=torch.int32)
    _gating(
        (scores.data_ptr(), bias.data_ptr(), weights.data_ptr(), experts.data_ptr()),
        (num_rows, num_experts, num_experts_per_token, num_groups, num_kept_groups),
        scale,
        FLOATS[scores.dtype],
    )
    return weights, experts


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
    _permute(
        (x.data_ptr(), x.shape[1] * x.element_size(), copies.data_ptr()),
        (experts.data_ptr(), num_rows, k, num_experts),
        (places.data_ptr(), counts.data_ptr()),
    )
    return copies, places, counts


def accepts_groups(x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> bool:
    """float32 or bfloat16; matrices that lie transposed, as checkpoints have them; few rows."""
    return (
        x.dtype in FLOATS
        and x.dtype == weights.dtype
        and len(x) <= MOST_ROWS
        and x.is_contiguous()
        and weights.mT.is_contiguous()
        and counts.is_contiguous()
    )


def grouped_matmul(x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    num_groups, width, out = weights.shape
    output = x.new_empty(len(x), out)
    work: Any = _work_bfloat16 if x.dtype == torch.bfloat16 else _work_float32
    _grouped_matmul(
        (x.data_ptr(), len(x), width),
        (weights.data_ptr(), counts.data_ptr(), num_groups, out),
        output.data_ptr(),
        (work.address, parallel_region(), num_threads()),
    )
    return output


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
    _unpermute(
        (copies.data_ptr(), weights.data_ptr(), places.data_ptr(), output.data_ptr()),
        (num_rows, k, copies.shape[1]),
        FLOATS[copies.dtype],
        FLOATS[weights.dtype],
    )
    return output


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _gating(addresses, sizes, scale, element):
    num_rows, num_experts, k, num_groups, num_kept_groups = sizes
    scores = array_at(addresses[0], (num_rows, num_experts), element)
    bias = array_at(addresses[1], (num_experts,), element)
    weights = array_at(addresses[2], (num_rows, k), element)
    experts = array_at(addresses[3], (num_rows, k), np.int32(0))
    size = num_experts // num_groups
    affinity = np.empty(num_experts, np.float32)
    choice = np.empty(num_experts, np.float32)
    of_group = np.empty(num_groups, np.float32)
    for row in range(num_rows):
        for e in range(num_experts):
            affinity[e] = np.float32(1) / (np.float32(1) + exp(-widen(scores[row, e])))
            choice[e] = affinity[e] + widen(bias[e])
        for g in range(num_groups):
            first = second = np.float32(-np.inf)
            for value in choice[g * size : (g + 1) * size]:
                first, second = max(first, value), max(second, min(first, value))
            of_group[g] = first + second
        for _ in range(num_groups - num_kept_groups):
            least = _last_least(of_group)
            of_group[least] = np.inf
            choice[least * size : (least + 1) * size] = -np.inf
        total = np.float32(0)
        for j in range(k):
            best = np.argmax(choice)
            choice[best] = -np.inf
            experts[row, j] = best
            total += affinity[best]
        factor = np.float32(scale) / (total + np.float32(1e-20))
        for j in range(k):
            weights[row, j] = narrow(affinity[experts[row, j]] * factor, element)


@numba.njit(cache=True, error_model="numpy")
def _last_least(values):
    """Of equal groups the first are kept."""
    found = 0
    for i in range(1, len(values)):
        if values[i] <= values[found]:
            found = i
    return found


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _permute(rows, choices, results):
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


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _grouped_matmul(rows, groups, output, threads):
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


@numba.njit(cache=True, error_model="numpy")
def _work(address, element):
    """One thread's share: parts of the matrices of groups that have rows, as they come."""
    _, x, num_rows, width, weights, counts, num_groups, out, output = array_at(
        address, (NUM_PARTS,), np.int64(0)
    )
    x = array_at(x, (num_rows, width), element)
    weights = array_at(weights, (num_groups, out, width), element)
    counts = array_at(counts, (num_groups,), np.int64(0))
    output = array_at(output, (num_rows, out), element)
    parts = -(-out // PART)
    rows, values = np.empty((num_rows, width), np.float32), np.empty(width, np.float32)
    group, start, widened = 0, 0, 0
    while True:
        taken = take(address, 1)
        if taken >= num_groups * parts:
            return
        while group < taken // parts:
            start += counts[group]
            group += 1
        stop = start + counts[group]
        if start == stop:
            continue
        if widened < stop:
            for row in range(start, stop):
                for i in range(width):
                    rows[row, i] = widen(x[row, i])
            widened = stop
        first = taken % parts * PART
        for n in range(first, min(first + PART, out)):
            for i in range(width):
                values[i] = widen(weights[group, n, i])
            _dots(values, rows[start:stop], output[start:stop], n)


@numba.njit(cache=True, fastmath=FAST, error_model="numpy")
def _dots(values, rows, output, n):
    """Column n of the output: a row of weights times every row, four at a time."""
    num_rows, width = rows.shape
    like = output[0, 0]
    row = 0
    while row + 4 <= num_rows:
        a, b, c, d = rows[row], rows[row + 1], rows[row + 2], rows[row + 3]
        first = second = third = fourth = np.float32(0)
        for i in range(width):
            value = values[i]
            first += value * a[i]
            second += value * b[i]
            third += value * c[i]
            fourth += value * d[i]
        output[row, n], output[row + 1, n] = narrow(first, like), narrow(second, like)
        output[row + 2, n], output[row + 3, n] = narrow(third, like), narrow(fourth, like)
        row += 4
    while row < num_rows:
        a, total = rows[row], np.float32(0)
        for i in range(width):
            total += values[i] * a[i]
        output[row, n] = narrow(total, like)
        row += 1


@numba.njit(cache=True, nogil=True, fastmath=FAST, error_model="numpy")
def _unpermute(addresses, sizes, element, weight):
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


@numba.cfunc("void(intp)", cache=True)
def _work_float32(job):
    _work(job, np.float32(0))


@numba.cfunc("void(intp)", cache=True)
def _work_bfloat16(job):
    _work(job, np.uint16(0))
