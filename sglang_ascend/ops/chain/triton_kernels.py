"""Step preparation as one Triton launch; plain pointers, as triton-ascend takes them too."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
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
    max_kv_len,
    NUM_STEPS: tl.constexpr,
    WINDOW: tl.constexpr,  # a power of two, at least 2 * NUM_STEPS
    BLOCK: tl.constexpr,
):
    """One program per request: its rows' places, then BLOCK positions of its table at a time."""
    request = tl.program_id(0)
    seq_len = tl.load(seq_lens + request)
    listed = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * max_context_len

    ramp = tl.arange(0, WINDOW)
    window = tl.load(listed + seq_len + ramp, mask=ramp < 2 * NUM_STEPS, other=0).to(tl.int64)
    tl.store(slots + request * 2 * NUM_STEPS + ramp, window, mask=ramp < 2 * NUM_STEPS)
    verified = ramp < NUM_STEPS + 1
    first = request * (NUM_STEPS + 1)
    tl.store(positions + first + ramp, seq_len + ramp, mask=verified)
    tl.store(row_slots + first + ramp, window, mask=verified)
    tl.store(kv_lens + request, seq_len + NUM_STEPS + 1)

    row = block_table + request.to(tl.int64) * max_kv_len
    for start in range(0, max_kv_len, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < max_kv_len
        tl.store(row + offsets, tl.load(listed + offsets, mask=inside).to(tl.int64), mask=inside)
