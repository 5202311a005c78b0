"""Latent attention in Triton for Ascend, and what all kernels of attention have in common: plain
pointers, as triton-ascend takes them too, the softmax of a tile, and the merge of splits.

A row's fp32 sums, as wide as the latent, are what near memory has no room for: they are cut into
four parts by columns, so that what is computed of them at once is narrow.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers that change while serving are compiled for once, whether 1, a multiple of 16 or neither:
# a number of splits in each program would be up to 20 compilations of each kernel.
CHANGING = ["table_stride", "num_splits"]
# Those of a chain's draft decodes are rows of one tensor, at any distance.
UNALIGNED = ["kv_lens"]


@triton.jit
def _span_of_split(kv_len, split, num_splits, BLOCK_N: tl.constexpr):
    """[first, end) of a split's keys: whole tiles, spread evenly; empty past the last tile."""
    keys_per_split = tl.cdiv(tl.cdiv(kv_len, BLOCK_N), num_splits) * BLOCK_N
    first = split * keys_per_split
    return first, tl.minimum(first + keys_per_split, kv_len)


@triton.jit
def _slots_of_tile(pages, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """int64 [BLOCK_N]: where the keys from ``start`` on lie in the pool."""
    ramp = tl.arange(0, BLOCK_N)
    if PAGE_SIZE % BLOCK_N == 0:
        # The tile lies in one page: a scalar index and one run of slots, not a gather.
        page = tl.load(pages + start // PAGE_SIZE).to(tl.int64)
        slots = page * PAGE_SIZE + start % PAGE_SIZE + ramp
    else:
        keys = start + ramp
        page = tl.load(pages + keys // PAGE_SIZE, mask=keys < end, other=0).to(tl.int64)
        slots = page * PAGE_SIZE + keys % PAGE_SIZE
    return slots


@triton.jit
def _num_visible(kv_len, query, QUERY_LEN: tl.constexpr):
    """How many keys a request's query row ``query`` sees: all up to itself."""
    return kv_len - QUERY_LEN + query + 1


@triton.jit
def _softmax_step(scores, highest, total):
    """One tile of the online softmax: (weights, factor of what was summed before, both states)."""
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # A row that has seen no key yet has weights exp(-inf - 0) = 0, not exp(-inf + inf).
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp(scores - shift[:, None])
    factor = tl.exp(highest - shift)
    return weights, factor, new_highest, total * factor + tl.sum(weights, 1)


@triton.jit
def _load_part(rows, mask, part, WIDTH: tl.constexpr, PART: tl.constexpr):
    columns = part * PART + tl.arange(0, PART)[None, :]
    return tl.load(rows + columns, mask=mask & (columns < WIDTH), other=0.0)


@triton.jit
def _load_parts(rows, mask, WIDTH: tl.constexpr, PART: tl.constexpr, OPERAND: tl.constexpr):
    """Rows of ``WIDTH`` elements as four tensors [rows, PART] of factors."""
    part_0 = _load_part(rows, mask, 0, WIDTH, PART).to(OPERAND)
    part_1 = _load_part(rows, mask, 1, WIDTH, PART).to(OPERAND)
    part_2 = _load_part(rows, mask, 2, WIDTH, PART).to(OPERAND)
    part_3 = _load_part(rows, mask, 3, WIDTH, PART).to(OPERAND)
    return part_0, part_1, part_2, part_3


@triton.jit
def _store_part(rows, value, mask, part, WIDTH: tl.constexpr, PART: tl.constexpr):
    columns = part * PART + tl.arange(0, PART)[None, :]
    tl.store(rows + columns, value, mask=mask & (columns < WIDTH))


@triton.jit
def _scores(
    query_0, query_1, query_2, query_3, query_turned, key_0, key_1, key_2, key_3, key_turned
):
    scores = tl.dot(query_0, tl.trans(key_0), input_precision="ieee")
    scores = tl.dot(query_1, tl.trans(key_1), scores, input_precision="ieee")
    scores = tl.dot(query_2, tl.trans(key_2), scores, input_precision="ieee")
    scores = tl.dot(query_3, tl.trans(key_3), scores, input_precision="ieee")
    return tl.dot(query_turned, tl.trans(key_turned), scores, input_precision="ieee")


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def mla_in_parts(
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
    BLOCK_ROPE: tl.constexpr,
    PART: tl.constexpr,  # columns of a quarter of the sums
):
    """``triton_kernels.mla_split`` with its sums in parts: 64 rows fit where 16 did."""
    split, request = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < QUERY_LEN * NUM_HEADS)[:, None]
    first_row = request.to(tl.int64) * (QUERY_LEN * NUM_HEADS)
    rope = tl.arange(0, BLOCK_ROPE)[None, :]
    query_rows = query + first_row * query_stride + rows[:, None] * query_stride
    query_0, query_1, query_2, query_3 = _load_parts(query_rows, inside, RANK, PART, OPERAND)
    query_rows = query_rope + first_row * query_rope_stride + rows[:, None] * query_rope_stride
    query_turned = tl.load(query_rows + rope, mask=inside & (rope < ROPE_DIM), other=0.0)
    query_turned = query_turned.to(OPERAND)

    kv_len = tl.load(kv_lens + request).to(tl.int32)
    num_visible = _num_visible(kv_len, rows // NUM_HEADS, QUERY_LEN)
    pages = block_table + request.to(tl.int64) * table_stride
    num_splits = num_splits if IS_SPLIT else 1
    first, end = _span_of_split(kv_len, split, num_splits, BLOCK_N)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sum_0 = tl.zeros([BLOCK_M, PART], tl.float32)
    sum_1 = tl.zeros([BLOCK_M, PART], tl.float32)
    sum_2 = tl.zeros([BLOCK_M, PART], tl.float32)
    sum_3 = tl.zeros([BLOCK_M, PART], tl.float32)
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
        scores = _scores(
            query_0, query_1, query_2, query_3, query_turned, key_0, key_1, key_2, key_3, turned
        )
        visible = keys[None, :] < num_visible[:, None]
        scores = tl.where(visible, scores * scale, float("-inf"))
        weights, factor, highest, total = _softmax_step(scores, highest, total)
        weights, factor = weights.to(key_0.dtype), factor[:, None]
        sum_0 = tl.dot(weights, key_0, sum_0 * factor, input_precision="ieee")
        sum_1 = tl.dot(weights, key_1, sum_1 * factor, input_precision="ieee")
        sum_2 = tl.dot(weights, key_2, sum_2 * factor, input_precision="ieee")
        sum_3 = tl.dot(weights, key_3, sum_3 * factor, input_precision="ieee")

    total = tl.maximum(total, 1.0)  # no change to a row that has seen a key: its highest weighs 1
    places = rows * num_splits + split
    if IS_SPLIT:
        mass = highest + tl.log(total)  # -inf where nothing was seen
        tl.store(masses + first_row * num_splits + places, mass, mask=rows < QUERY_LEN * NUM_HEADS)
    output_rows = output + first_row * num_splits * RANK + places[:, None] * RANK
    _store_part(output_rows, sum_0 / total[:, None], inside, 0, RANK, PART)
    _store_part(output_rows, sum_1 / total[:, None], inside, 1, RANK, PART)
    _store_part(output_rows, sum_2 / total[:, None], inside, 2, RANK, PART)
    _store_part(output_rows, sum_3 / total[:, None], inside, 3, RANK, PART)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(
    split_outputs,
    masses,
    output,
    num_splits,
    QUERY_LEN: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,  # as many as there can be, or more
    BLOCK_WIDTH: tl.constexpr,
):
    """Program (row, columns): the outputs of a row's splits, weighed by the softmax of masses.

    Rows lie by request, key head, query and head of the group; the output's by query first.
    """
    row = tl.program_id(0)
    head, query = row % GROUP, row // GROUP % QUERY_LEN
    stream = row // (GROUP * QUERY_LEN)
    request, kv_head = stream // NUM_KV_HEADS, stream % NUM_KV_HEADS
    output_row = ((request * QUERY_LEN + query) * NUM_KV_HEADS + kv_head) * GROUP + head

    splits = tl.arange(0, BLOCK_SPLITS)
    masses += row.to(tl.int64) * num_splits
    mass = tl.load(masses + splits, mask=splits < num_splits, other=float("-inf"))
    highest = tl.max(mass, 0)
    weights = tl.exp(mass - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.maximum(tl.sum(weights, 0), 1.0)  # the highest mass has weight 1, if there is one

    columns = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    seen = (mass > float("-inf"))[:, None] & (columns < WIDTH)[None, :]
    split_outputs += row.to(tl.int64) * (num_splits * WIDTH)
    places = splits[:, None] * WIDTH + columns[None, :]
    # triton-ascend keeps masks that follow from places, and reads what others exclude.
    within = (splits < num_splits)[:, None] & (columns < WIDTH)[None, :]
    outputs = tl.where(seen, tl.load(split_outputs + places, mask=within, other=0.0), 0.0)
    merged = tl.sum(outputs * weights[:, None], 0) / total
    tl.store(output + output_row.to(tl.int64) * WIDTH + columns, merged, mask=columns < WIDTH)
