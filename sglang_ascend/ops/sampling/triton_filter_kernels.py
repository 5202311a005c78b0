"""The joint filters' last stage in Triton: each token's share of its row, from the threshold on."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton's annotations: a sum may be a tuple, and a literal is no constexpr.)

from __future__ import annotations

import triton
import triton.language as tl

from sglang_ascend.ops.sampling.triton_kernels import UNALIGNED


@triton.jit
def load_block(logits, start, vocab_size, BLOCK: tl.constexpr):
    tokens = start + tl.arange(0, BLOCK)
    return tl.load(logits + tokens, mask=tokens < vocab_size, other=-float("inf"))


@triton.jit
def count(chosen):
    return tl.sum(tl.where(chosen, 1.0, 0.0))


@triton.jit
def end_of(chosen, space, BLOCK: tl.constexpr):
    """Up to which place a block holds no more than ``space`` chosen ones: by bisection, for a
    running count is a loop over single elements on an NPU."""
    places = tl.arange(0, BLOCK)
    low, high = BLOCK, BLOCK + 1
    if count(chosen) > space:
        low, high = 0, BLOCK
    while low + 1 < high:
        middle = (low + high) // 2
        fits = count(chosen & (places < middle)) <= space
        low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
    return low


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def weigh(
    logits,
    thresholds,
    largest_logits,
    row_masses,
    top_ks,
    top_ps,
    min_ps,
    probs,
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """One program per row. Of the tokens equal to the smallest one above the threshold as many stay
    as top_k has room for, and as have no more than top_p of the mass before them: at least one."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    probs += row * vocab_size
    threshold, largest = tl.load(thresholds + row), tl.load(largest_logits + row)
    top_p, min_p = tl.load(top_ps + row), tl.load(min_ps + row)

    lowest = float("inf")
    for start in range(0, vocab_size, BLOCK):
        x = load_block(logits, start, vocab_size, BLOCK)
        lowest = tl.minimum(lowest, tl.min(tl.where(x >= threshold, x, float("inf"))))

    num_above, num_equal, mass_above, mass = 0.0, 0.0, 0.0, 0.0
    for start in range(0, vocab_size, BLOCK):
        x = load_block(logits, start, vocab_size, BLOCK)
        weights = tl.where(x > lowest, tl.exp(x - largest), 0.0)
        num_above += count(x > lowest)
        num_equal += count(x == lowest)
        mass_above += tl.sum(weights)
        mass += tl.sum(tl.where(weights >= min_p, weights, 0.0))

    weight = tl.exp(lowest - largest)
    room = tl.load(top_ks + row).to(tl.float32) - num_above
    fits = tl.floor((top_p * tl.load(row_masses + row) - mass_above) / weight) + 1.0
    room = tl.maximum(tl.where(top_p < 1.0, tl.minimum(room, fits), room), 1.0)
    mass += tl.where(weight >= min_p, tl.minimum(room, num_equal) * weight, 0.0)

    for start in range(0, vocab_size, BLOCK):
        x = load_block(logits, start, vocab_size, BLOCK)
        equal, places = x == lowest, tl.arange(0, BLOCK)
        first = equal & (places < end_of(equal, tl.maximum(room, 0.0), BLOCK))
        room -= count(equal)
        weights = tl.exp(x - largest)
        kept = ((x > lowest) | first) & (weights >= min_p)
        tokens = start + places
        tl.store(probs + tokens, tl.where(kept, weights / mass, 0.0), mask=tokens < vocab_size)
