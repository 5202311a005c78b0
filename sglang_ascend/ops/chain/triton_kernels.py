"""The chain operators in Triton, one launch each; plain pointers, as triton-ascend takes them."""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers that change while serving are compiled for once, whether 1, a multiple of 16 or neither.


@triton.jit(do_not_specialize=["num_pages"])
def prepare_step(
    seq_lens,
    req_pool_indices,
    req_to_token,
    positions,
    row_slots,
    slots,
    kv_lens,
    block_table,
    max_context_len,
    num_pages,
    NUM_STEPS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,  # that a step writes: 2 * NUM_STEPS, at least 1
    WINDOW: tl.constexpr,  # a power of two, at least NUM_SLOTS
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per request: its rows' places, then BLOCK positions of its table at a time."""
    request = tl.program_id(0)
    seq_len = tl.load(seq_lens + request)
    listed = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * max_context_len

    ramp = tl.arange(0, WINDOW)
    window = tl.load(listed + seq_len + ramp, mask=ramp < NUM_SLOTS, other=0).to(tl.int64)
    tl.store(slots + request * NUM_SLOTS + ramp, window, mask=ramp < NUM_SLOTS)
    verified = ramp < NUM_STEPS + 1
    first = request * (NUM_STEPS + 1)
    position = (seq_len.to(tl.int32) + ramp).to(tl.int64)  # a 910 adds no vectors of 64 bits
    tl.store(positions + first + ramp, position, mask=verified)
    tl.store(row_slots + first + ramp, window, mask=verified)
    tl.store(kv_lens + request, seq_len + NUM_STEPS + 1)

    row = block_table + request.to(tl.int64) * num_pages
    reach = seq_len.to(tl.int32) + NUM_SLOTS
    own_pages = (reach + PAGE_SIZE - 1) // PAGE_SIZE
    for start in range(0, num_pages, BLOCK):
        pages = start + tl.arange(0, BLOCK)
        # Entries lie PAGE_SIZE apart: each that is read costs an access of its own.
        first_slots = tl.load(listed + pages * PAGE_SIZE, mask=pages < own_pages, other=0)
        tl.store(row + pages, (first_slots // PAGE_SIZE).to(tl.int64), mask=pages < num_pages)


@triton.jit(do_not_specialize=["batch_size"])
def verify_chain(
    sampled,
    draft_tokens,
    accept_lens,
    sampled_stride,
    draft_stride,
    batch_size,
    NUM_STEPS: tl.constexpr,
    WINDOW: tl.constexpr,  # a power of two, at least NUM_STEPS
    REQUESTS: tl.constexpr,
):
    """REQUESTS per program: the place of the first draft that the target did not draw."""
    requests = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    ramp = tl.arange(0, WINDOW)[None, :]
    inside = (requests < batch_size)[:, None] & (ramp < NUM_STEPS)
    drawn = tl.load(sampled + requests[:, None] * sampled_stride + ramp, mask=inside, other=0)
    drafted = tl.load(draft_tokens + requests[:, None] * draft_stride + ramp, mask=inside, other=0)
    # The 910's vector unit compares no 64-bit integers; a token fits 32.
    refused = inside & (drawn.to(tl.int32) != drafted.to(tl.int32))
    kept = tl.where(refused, ramp + 1, NUM_STEPS + 1)
    tl.store(accept_lens + requests, tl.min(kept, 1), mask=requests < batch_size)


@triton.jit(do_not_specialize=["batch_size"])
def place_draft_decode(
    new_seq_lens,
    accept_lens,
    slots,
    positions,
    draft_slots,
    kv_lens,
    batch_size,
    num_slots,
    NUM_DRAFTS: tl.constexpr,
    WINDOW: tl.constexpr,  # a power of two, at least NUM_DRAFTS
):
    """One program per request: its column of each of the three [NUM_DRAFTS, batch] outputs."""
    request = tl.program_id(0)
    ramp = tl.arange(0, WINDOW)
    inside = ramp < NUM_DRAFTS
    position = tl.load(new_seq_lens + request).to(tl.int32) + ramp
    behind = slots + request * num_slots + tl.load(accept_lens + request)
    places = ramp * batch_size + request
    tl.store(positions + places, position.to(tl.int64), mask=inside)
    tl.store(draft_slots + places, tl.load(behind + ramp, mask=inside, other=0), mask=inside)
    tl.store(kv_lens + places, (position + 1).to(tl.int64), mask=inside)
