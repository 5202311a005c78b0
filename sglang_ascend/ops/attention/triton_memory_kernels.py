"""Latent attention of many query rows for Ascend: their sums lie in memory, the output so far."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_ascend.ops.attention.triton_latent_kernels import (
    CHANGING,
    UNALIGNED,
    _load_parts,
    _num_visible,
    _scores,
    _slots_of_tile,
    _span_of_split,
    _store_part,
)


@triton.jit
def _mass_with(mass, scores):
    """log(exp(mass) + the sum of exp(scores)), by rows; -inf where both are nothing."""
    highest = tl.maximum(mass, tl.max(scores, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.exp(mass - shift) + tl.sum(tl.exp(scores - shift[:, None]), 1)
    return tl.where(highest == float("-inf"), highest, shift + tl.log(tl.maximum(total, 1.0)))


@triton.jit
def _add_part(sums, weights, values, factor, mask, part, WIDTH: tl.constexpr, PART: tl.constexpr):
    """sums * factor + weights @ values in memory; what has factor 0 may be unwritten."""
    columns = part * PART + tl.arange(0, PART)[None, :]
    so_far = tl.load(sums + columns, mask=mask & (columns < WIDTH), other=0.0)
    so_far = tl.where(factor > 0.0, so_far * factor, 0.0)
    added = tl.dot(weights.to(values.dtype), values, so_far, input_precision="ieee")
    _store_part(sums, added, mask, part, WIDTH, PART)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def mla_in_memory(
    query,
    query_rope,
    latent_cache,
    rope_cache,
    block_table,
    kv_lens,
    output,
    masses,
    scale,
    query_stride,
    query_rope_stride,
    latent_stride,
    rope_stride,
    table_stride,
    num_splits,
    QUERY_LEN: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    OPERAND: tl.constexpr,  # the dtype of the products' factors
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    PART: tl.constexpr,  # columns of a quarter of the sums
    NUM_BLOCKS: tl.constexpr,  # blocks of rows that a program takes
):
    """Program (rows, split, request): each tile of keys meets ``NUM_BLOCKS`` blocks of rows.

    output, fp32, and masses are at each tile those of the keys before it: the mass M of a row
    becomes M' = log(exp M + sum exp s), its output exp(M - M') output + exp(s - M') keys.
    """
    split, request = tl.program_id(1), tl.program_id(2)
    first_row = request.to(tl.int64) * (QUERY_LEN * NUM_HEADS)
    rope = tl.arange(0, BLOCK_ROPE)[None, :]
    query += first_row * query_stride
    query_rope += first_row * query_rope_stride
    output += first_row * num_splits * RANK
    masses += first_row * num_splits
    kv_len = tl.load(kv_lens + request).to(tl.int32)
    pages = block_table + request.to(tl.int64) * table_stride
    first, end = _span_of_split(kv_len, split, num_splits, BLOCK_N)
    for block in range(NUM_BLOCKS):
        rows = (tl.program_id(0) * NUM_BLOCKS + block) * BLOCK_M + tl.arange(0, BLOCK_M)
        nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
        tl.store(masses + rows * num_splits + split, nothing, mask=rows < QUERY_LEN * NUM_HEADS)
    for start in range(first, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        slots = _slots_of_tile(pages, start, end, PAGE_SIZE, BLOCK_N)[:, None]
        # What lies past the end belongs to nobody: not even its product with 0 is let in.
        written = (keys < end)[:, None]
        key_0, key_1, key_2, key_3 = _load_parts(
            latent_cache + slots * latent_stride, written, RANK, PART, OPERAND
        )
        turned = rope_cache + slots * rope_stride + rope
        turned = tl.load(turned, mask=written & (rope < ROPE_DIM), other=0.0).to(OPERAND)
        for block in range(NUM_BLOCKS):
            rows = (tl.program_id(0) * NUM_BLOCKS + block) * BLOCK_M + tl.arange(0, BLOCK_M)
            inside = (rows < QUERY_LEN * NUM_HEADS)[:, None]
            query_0, query_1, query_2, query_3 = _load_parts(
                query + rows[:, None] * query_stride, inside, RANK, PART, OPERAND
            )
            query_turned = query_rope + rows[:, None] * query_rope_stride + rope
            query_turned = tl.load(query_turned, mask=inside & (rope < ROPE_DIM), other=0.0)
            query_turned = query_turned.to(OPERAND)
            scores = _scores(
                query_0, query_1, query_2, query_3, query_turned, key_0, key_1, key_2, key_3, turned
            )
            num_visible = _num_visible(kv_len, rows // NUM_HEADS, QUERY_LEN)
            visible = keys[None, :] < num_visible[:, None]
            scores = tl.where(visible, scores * scale, float("-inf"))
            places = rows * num_splits + split
            known = rows < QUERY_LEN * NUM_HEADS
            mass_before = tl.load(masses + places, mask=known, other=0.0)
            mass = _mass_with(mass_before, scores)
            tl.store(masses + places, mass, mask=known)
            # A row that has seen no key yet has weights and a factor of exp(-inf - 0) = 0.
            shift = tl.where(mass == float("-inf"), 0.0, mass)
            weights = tl.exp(scores - shift[:, None])
            factor = tl.exp(mass_before - shift)[:, None]
            sums = output + places[:, None] * RANK
            _add_part(sums, weights, key_0, factor, inside, 0, RANK, PART)
            _add_part(sums, weights, key_1, factor, inside, 1, RANK, PART)
            _add_part(sums, weights, key_2, factor, inside, 2, RANK, PART)
            _add_part(sums, weights, key_3, factor, inside, 3, RANK, PART)
