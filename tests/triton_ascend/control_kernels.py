"""Kernels that no product needs: each is lowered to something that a test must notice."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, output, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    total = tl.load(x + offsets, mask=mask, other=0) + tl.load(y + offsets, mask=mask, other=0)
    tl.store(output + offsets, total, mask=mask)


@triton.jit
def add_tile_by_tile(x, y, output, size, BLOCK: tl.constexpr):
    """The loop is what the compiler doubles the buffers for."""
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < size
        total = tl.load(x + offsets, mask=mask) + tl.load(y + offsets, mask=mask)
        tl.store(output + offsets, total, mask=mask)


@triton.jit
def cumulate(x, output, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(output + offsets, tl.cumsum(tl.load(x + offsets), 0))


@triton.jit
def gather_elements(x, places, output, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(output + offsets, tl.load(x + tl.load(places + offsets)))


@triton.jit
def gather_if_inside(x, places, output, size, BLOCK: tl.constexpr):
    """Upstream's Triton reads nothing where the mask is false."""
    offsets = tl.arange(0, BLOCK)
    place = tl.load(places + offsets)
    values = tl.load(x + place, mask=(place >= 0) & (place < size), other=0.0)
    tl.store(output + offsets, values)


@triton.jit
def store_positive(x, output, BLOCK: tl.constexpr):
    """Upstream's Triton neither reads nor writes where the mask is false."""
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + offsets)
    tl.store(output + offsets, values, mask=values > 0)


@triton.jit
def scatter_elements(x, places, output, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    place = tl.load(places + offsets)
    tl.store(output + place, tl.load(x + offsets), mask=place >= 0)


@triton.jit
def sum_rows(x, places, output, num_rows, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of the rows of x that ``places`` names."""
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside = rows < num_rows
    place = tl.load(places + rows, mask=inside, other=0)
    values = tl.load(x + place[:, None] * WIDTH + columns[None, :], mask=inside[:, None], other=0.0)
    tl.store(output + columns, tl.sum(values, 0))


@triton.jit
def softmax(x, output, stride, size, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    mask = columns < size
    logits = tl.load(x + row * stride + columns, mask=mask, other=float("-inf"))
    weights = tl.exp(logits - tl.max(logits, 0))
    tl.store(output + row * stride + columns, weights / tl.sum(weights, 0), mask=mask)


@triton.jit
def multiply(x, y, output, SIZE: tl.constexpr):
    """x [SIZE, SIZE] times y transposed."""
    ramp = tl.arange(0, SIZE)
    places = ramp[:, None] * SIZE + ramp[None, :]
    tl.store(output + places, tl.dot(tl.load(x + places), tl.trans(tl.load(y + places))))


@triton.jit
def copy_by_descriptor(x, output, SIZE: tl.constexpr):
    descriptor = tl.make_tensor_descriptor(
        x, shape=[SIZE, SIZE], strides=[SIZE, 1], block_shape=[SIZE, SIZE]
    )
    ramp = tl.arange(0, SIZE)
    tl.store(output + ramp[:, None] * SIZE + ramp[None, :], descriptor.load([0, 0]))


@triton.jit
def exchange(x, output, BLOCK: tl.constexpr):
    """An atomic that the chips have no instruction for: cores take a lock in turns."""
    offsets = tl.arange(0, BLOCK)
    tl.store(output + offsets, tl.atomic_cas(x + offsets, tl.zeros([BLOCK], tl.int32), offsets))
