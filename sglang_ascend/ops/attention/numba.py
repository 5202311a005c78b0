"""Grouped-query and latent attention on CPU, compiled by Numba: the pages are read where they lie.

Gathering the keys of a batch first, as PyTorch must, writes and reads them once more. Query rows
and heads that share a key are rows of one product. Threads take a request at a time, or of few
requests a key head at a time. Compiled code is kept on disk.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from sglang_ascend.ops.attention.numba_tiles import (
    KEYS,
    ROWS,
    add_values,
    score,
    total_of,
    widen_vectors,
)
from sglang_ascend.ops.attention.reference import whole
from sglang_ascend.ops.numba_cache import cfunc, njit
from sglang_ascend.ops.numba_floats import FLOATS, array_at, exp, narrow, widen
from sglang_ascend.ops.numba_threads import num_threads, parallel_region, run_on_threads, take
from sglang_ascend.ops.numba_vectors import LANES

# Keys that are widened at a time: with as many values they stay in the nearest cache.
BLOCK = 8 * KEYS
# Products of a query and a key for which one more thread is worth its start.
PRODUCTS_OF_THREAD = 4096
# The logarithm of 2^-64. Keys of less weight, over the heaviest, add less than the sum is rounded
# by; a product with a weight that is a denormal float takes many times as long.
LEAST = np.float32(-64 * math.log(2))
# Numbers that describe to the threads what is attended to.
NUM_PARTS = 20


def accepts(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    **sizes: object,
) -> bool:
    """float32 or bfloat16 throughout; caches whose pages lie one behind another."""
    return (
        query.dtype in FLOATS
        and key_cache.dtype == value_cache.dtype == query.dtype
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and block_table.stride(1) == 1
        and kv_lens.is_contiguous()
        and block_table.dtype == kv_lens.dtype == torch.int64
    )


def paged_gqa(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    query_len: int,
    page_size: int,
    scale: float,
    value_dim: int | None = None,
) -> torch.Tensor:
    """``reference.paged_gqa`` of what ``accepts``; weights and sums stay float32. Of each value
    the first ``value_dim`` columns count, if not all."""
    query = query.contiguous()
    num_slots, num_kv_heads, value_width = value_cache.shape
    value_dim = value_dim or value_width
    output = query.new_empty(*query.shape[:-1], value_dim)
    caches = key_cache.data_ptr(), value_cache.data_ptr(), num_slots, num_kv_heads
    attend(
        (query.data_ptr(), output.data_ptr(), query_len, *query.shape[1:]),
        (*caches, value_width, value_dim),
        (block_table.data_ptr(), block_table.stride(0), page_size),
        (kv_lens.data_ptr(), len(kv_lens)),
        scale,
        (work_of(query.dtype), parallel_region(), num_threads()),
    )
    return output


def work_of(dtype: torch.dtype) -> int:
    """The address of what attends in this dtype."""
    work: Any = _work_bfloat16 if dtype == torch.bfloat16 else _work_float32
    return work.address


def accepts_latent(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    *pages: torch.Tensor,
    rope_cache: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    **sizes: object,
) -> bool:
    """As ``accepts``, of a cache in one part; a query may be in two."""
    return (
        rope_cache is None
        and (query_rope is None or query_rope.dtype == query.dtype)
        and accepts(query, latent_cache, latent_cache, *pages)
    )


def paged_mla(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    *pages: torch.Tensor,
    query_len: int,
    page_size: int,
    scale: float,
    kv_lora_rank: int,
    rope_cache: None = None,
    query_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """``reference.paged_mla``: one key head, whose values are its keys without the rope part."""
    return paged_gqa(
        whole(query, query_rope),
        latent_cache,
        latent_cache,
        *pages,
        query_len=query_len,
        page_size=page_size,
        scale=scale,
        value_dim=kv_lora_rank,
    )


@njit(nogil=True, error_model="numpy")
def attend(queries, caches, pages, lengths, scale, threads):
    """Everything behind addresses; writes the output."""
    work, region, num_threads = threads
    address, batch_size = lengths
    lengths = array_at(address, (batch_size,), np.int64(0))
    longest, total = np.int64(0), np.int64(0)
    for length in lengths:
        longest, total = max(longest, length), total + length
    heads = caches[3] if batch_size >= 2 * num_threads else 1
    # The first is what threads have taken, the second will be the scale.
    described = (0, 0, *queries, *caches, *pages, address, batch_size, longest, heads)
    job: Any = np.empty(NUM_PARTS, np.int64)
    for n in range(NUM_PARTS):
        job[n] = described[n]
    job.view(np.float64)[1] = scale
    _, _, query_len, num_heads, _ = queries
    worthwhile = 1 + total * query_len * num_heads // PRODUCTS_OF_THREAD
    run_on_threads(region, work, job.ctypes.data, min(num_threads, worthwhile))
    return job[0]  # so that the job lives as long as the threads


@njit(error_model="numpy")
def _work(address, element):
    """One thread's share: ``heads`` key heads of a request at a time, as they come."""
    job: Any = array_at(address, (NUM_PARTS,), np.int64(0))
    scale = np.float32(job.view(np.float64)[1])
    query, output, query_len, num_heads, dim = job[2:7]
    key_cache, value_cache, num_slots, num_kv_heads, value_width, value_dim = job[7:13]
    block_table, row_stride, page_size = job[13:16]
    lengths, batch_size, longest, heads = job[16:20]
    query = array_at(query, (batch_size, query_len, num_heads, dim), element)
    output = array_at(output, (batch_size, query_len, num_heads, value_dim), element)
    key_cache = array_at(key_cache, (num_slots, num_kv_heads, dim), element)
    value_cache = array_at(value_cache, (num_slots, num_kv_heads, value_width), element)
    block_table = array_at(block_table, (batch_size, row_stride), np.int64(0))
    lengths = array_at(lengths, (batch_size,), np.int64(0))
    group = num_heads // num_kv_heads
    num_rows = query_len * group
    parts = num_kv_heads // heads
    padded_rows = num_rows + (num_rows % ROWS == ROWS - 1)  # a row of zeros makes it a tile
    scaled = np.zeros((heads, padded_rows, _padded(dim, LANES)), np.float32)
    weights = np.zeros((heads, padded_rows, _padded(longest, KEYS)), np.float32)
    attended = np.empty((heads, padded_rows, _padded(value_dim, LANES)), np.float32)
    keys = np.zeros((heads, BLOCK, scaled.shape[2]), np.float32)
    # Zeros, for the columns that fill up vectors are multiplied too.
    values = np.zeros((heads, BLOCK, attended.shape[2]), np.float32)
    while True:
        taken = take(address, 1)
        if taken >= batch_size * parts:
            return
        b, first = taken // parts, taken % parts * heads
        length: Any = lengths[b]
        for h in range(heads):
            for row in range(num_rows):
                i, g = row // group, (first + h) * group + row % group
                for d in range(dim):
                    scaled[h, row, d] = widen(query[b, i, g, d]) * scale
        for j in range(0, length, BLOCK):
            count = min(BLOCK, length - j)
            _widen(key_cache, dim, first, block_table[b], page_size, j, count, keys, element)
            for h in range(heads):
                score(scaled[h], keys[h], count, weights[h], j)
        for h in range(heads):
            for row in range(num_rows):
                visible = length - query_len + row // group + 1
                softmax(weights[h, row, :visible])
                weights[h, row, visible:length] = 0
        attended[:] = 0
        for j in range(0, length, BLOCK):
            count = min(BLOCK, length - j)
            _widen(
                value_cache, value_dim, first, block_table[b], page_size, j, count, values, element
            )
            for h in range(heads):
                add_values(weights[h], j, values[h], count, attended[h])
        for h in range(heads):
            for row in range(num_rows):
                i, g = row // group, (first + h) * group + row % group
                for d in range(value_dim):
                    output[b, i, g, d] = narrow(attended[h, row, d], element)


@njit(error_model="numpy")
def _padded(size, multiple):
    return -(-size // multiple) * multiple


@njit(error_model="numpy")
def _widen(cache, dim, first, pages, page_size, start, count, rows, element):
    """Positions ``start`` to ``start + count`` of a request in ``rows``: their ``dim`` columns."""
    page, place = start // page_size, start % page_size
    num_heads, of_head = len(rows), cache.shape[2] * cache.itemsize
    of_slot, vectors, column = cache.shape[1] * of_head, dim // LANES, dim // LANES * LANES
    of_row, of_rows = 4 * rows.shape[2], 4 * rows.shape[1] * rows.shape[2]
    source, target = cache.ctypes.data + first * of_head, rows.ctypes.data
    for n in range(count):
        slot = pages[page] * page_size + place
        for h in range(num_heads):
            at_source, at_target = source + slot * of_slot + h * of_head, target + h * of_rows
            widen_vectors(element, at_source, vectors, at_target)
            for d in range(column, dim):
                rows[h, n, d] = widen(cache[slot, first + h, d])
        target += of_row
        place += 1
        if place == page_size:
            page, place = page + 1, 0


@njit(fastmath={"contract"}, error_model="numpy")
def softmax(scores):
    """In place, of one row; the same bits from every kernel that it is part of."""
    highest = np.float32(-np.inf)
    for j in range(len(scores)):
        highest = max(highest, scores[j])
    for j in range(len(scores)):
        below = scores[j] - highest
        scores[j] = exp(below) * np.float32(below > LEAST)
    vectors = len(scores) // LANES
    total = total_of(scores.ctypes.data, vectors)
    for j in range(vectors * LANES, len(scores)):
        total += scores[j]
    share = np.float32(1.0) / total
    for j in range(len(scores)):
        scores[j] *= share


@cfunc("void(intp)")
def _work_float32(job):
    _work(job, np.float32(0))


@cfunc("void(intp)")
def _work_bfloat16(job):
    _work(job, np.uint16(0))
