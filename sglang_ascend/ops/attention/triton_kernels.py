"""Paged attention of decode and verify in Triton: of grouped heads, and on GPUs of latents.

A split's program reads its share of the keys once, for all its query rows; a merge follows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_ascend.ops.attention.triton_latent_kernels import (
    CHANGING,
    UNALIGNED,
    _num_visible,
    _slots_of_tile,
    _softmax_step,
    _span_of_split,
)


@triton.jit
def _store_split(
    output,
    masses,
    weighted,
    highest,
    total,
    first_row,
    rows,
    inside,
    split,
    num_splits,
    IS_SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """output [rows, num_splits, WIDTH] = weighted / total, masses [rows, num_splits] = log-sum-exp.

    ``rows`` count from ``first_row``: what is added to a vector of them fits 32 bits. Of several
    splits one that a row sees nothing of has mass log 0.
    """
    total = tl.maximum(total, 1.0)  # no change to a row that has seen a key: its highest weighs 1
    result = weighted / total[:, None]
    places = rows * num_splits + split
    masses += first_row * num_splits
    output += first_row * num_splits * WIDTH
    columns = tl.arange(0, BLOCK_WIDTH)
    if IS_SPLIT:
        mass = highest + tl.log(total)  # -inf where nothing was seen
        tl.store(masses + places, mass, mask=inside)
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    tl.store(output + places[:, None] * WIDTH + columns[None, :], result, mask=mask)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def mla_split(
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
    IS_SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,  # the dtype of the products' factors
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """Program (rows, split, request); row r is head r % NUM_HEADS of query r // NUM_HEADS.

    Each tile of the latent stream is loaded once, as key (with its rope part) and as value.
    """
    split, request = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < QUERY_LEN * NUM_HEADS
    first_row = request.to(tl.int64) * (QUERY_LEN * NUM_HEADS)
    rank = tl.arange(0, BLOCK_RANK)[None, :]
    rope = tl.arange(0, BLOCK_ROPE)[None, :]
    query_rows = query + first_row * query_stride + rows[:, None] * query_stride
    query_rank = tl.load(query_rows + rank, mask=inside[:, None] & (rank < RANK), other=0.0)
    query_rank = query_rank.to(OPERAND)
    query_rows = query_rope + first_row * query_rope_stride + rows[:, None] * query_rope_stride
    query_turned = tl.load(query_rows + rope, mask=inside[:, None] & (rope < ROPE_DIM), other=0.0)
    query_turned = query_turned.to(OPERAND)

    kv_len = tl.load(kv_lens + request).to(tl.int32)
    num_visible = _num_visible(kv_len, rows // NUM_HEADS, QUERY_LEN)
    pages = block_table + request.to(tl.int64) * table_stride
    num_splits = num_splits if IS_SPLIT else 1
    first, end = _span_of_split(kv_len, split, num_splits, BLOCK_N)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    for start in range(first, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        slots = _slots_of_tile(pages, start, end, PAGE_SIZE, BLOCK_N)
        latent_rows = latent_cache + slots[:, None] * latent_stride
        rope_rows = rope_cache + slots[:, None] * rope_stride
        # What lies past the end belongs to nobody: not even its product with 0 is let in.
        written = (keys < end)[:, None]
        latent = tl.load(latent_rows + rank, mask=written & (rank < RANK), other=0.0)
        latent = latent.to(OPERAND)
        turned = tl.load(rope_rows + rope, mask=written & (rope < ROPE_DIM), other=0.0)
        scores = tl.dot(query_rank, tl.trans(latent), input_precision="ieee")
        turned = tl.trans(turned.to(OPERAND))
        scores = tl.dot(query_turned, turned, scores, input_precision="ieee")
        visible = keys[None, :] < num_visible[:, None]
        scores = tl.where(visible, scores * scale, float("-inf"))
        weights, factor, highest, total = _softmax_step(scores, highest, total)
        weighted *= factor[:, None]
        weighted = tl.dot(weights.to(latent.dtype), latent, weighted, input_precision="ieee")
    _store_split(
        output,
        masses,
        weighted,
        highest,
        total,
        first_row,
        rows,
        inside,
        split,
        num_splits,
        IS_SPLIT,
        RANK,
        BLOCK_RANK,
    )


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def gqa_split(
    query,
    key_cache,
    value_cache,
    block_table,
    kv_lens,
    output,
    masses,
    scale,
    key_stride,
    value_stride,
    table_stride,
    num_splits,
    QUERY_LEN: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a key head
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,  # the dtype of the products' factors
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Program (rows, split, request and key head); row r is head r % GROUP of query r // GROUP."""
    split = tl.program_id(1)
    request, kv_head = tl.program_id(2) // NUM_KV_HEADS, tl.program_id(2) % NUM_KV_HEADS
    folded = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = folded < QUERY_LEN * GROUP
    first_row = (request.to(tl.int64) * QUERY_LEN * NUM_KV_HEADS + kv_head) * GROUP
    rows = folded // GROUP * (NUM_KV_HEADS * GROUP) + folded % GROUP
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    mask = inside[:, None] & (dim < HEAD_DIM)
    query += first_row * HEAD_DIM
    # triton-ascend reads the rows of a gather that the mask excludes, too.
    last = tl.minimum(folded, QUERY_LEN * GROUP - 1)
    read = (last // GROUP * (NUM_KV_HEADS * GROUP) + last % GROUP)[:, None]
    query_rows = tl.load(query + read * HEAD_DIM + dim, mask=mask, other=0.0).to(OPERAND)

    kv_len = tl.load(kv_lens + request).to(tl.int32)
    num_visible = _num_visible(kv_len, folded // GROUP, QUERY_LEN)
    pages = block_table + request.to(tl.int64) * table_stride
    num_splits = num_splits if IS_SPLIT else 1
    first, end = _span_of_split(kv_len, split, num_splits, BLOCK_N)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    for start in range(first, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        slots = _slots_of_tile(pages, start, end, PAGE_SIZE, BLOCK_N)
        # What lies past the end belongs to nobody: not even its product with 0 is let in.
        written = (keys < end)[:, None] & (dim < HEAD_DIM)
        key_rows = key_cache + slots[:, None] * key_stride + kv_head * HEAD_DIM
        key = tl.load(key_rows + dim, mask=written, other=0.0).to(OPERAND)
        scores = tl.dot(query_rows, tl.trans(key), input_precision="ieee") * scale
        visible = keys[None, :] < num_visible[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        weights, factor, highest, total = _softmax_step(scores, highest, total)
        value_rows = value_cache + slots[:, None] * value_stride + kv_head * HEAD_DIM
        value = tl.load(value_rows + dim, mask=written, other=0.0).to(OPERAND)
        weighted *= factor[:, None]
        weighted = tl.dot(weights.to(value.dtype), value, weighted, input_precision="ieee")
    if IS_SPLIT:  # in the order of the programs, so that one writes one run of rows
        first_row, rows = tl.program_id(2).to(tl.int64) * (QUERY_LEN * GROUP), folded
    _store_split(
        output,
        masses,
        weighted,
        highest,
        total,
        first_row,
        rows,
        inside,
        split,
        num_splits,
        IS_SPLIT,
        HEAD_DIM,
        BLOCK_DIM,
    )
