"""What compiled MTP layers compute beside the compiled operators of other packages.

Places in memory are given by their addresses.
"""

from __future__ import annotations

import numpy as np

from sglang_ascend.ops.layers.numba import norm_rows
from sglang_ascend.ops.linear.numba import multiply
from sglang_ascend.ops.numba_cache import njit
from sglang_ascend.ops.numba_floats import array_at

# Products of one row for which one more thread is worth its start.
PRODUCTS_OF_THREAD = 1 << 17


@njit(error_model="numpy")
def join_states(embedding, vocab_size, tokens, states, norms, joined, shape, eps, element):
    """Each token's embedding and, behind it, its state; both normed."""
    n, hidden = shape
    address, stride = states
    tokens = array_at(tokens, (n,), np.int64(0))
    table = array_at(embedding, (vocab_size, hidden), element)
    half = hidden * table.itemsize
    for row in range(n):
        token = tokens[row]
        if not 0 <= token < vocab_size:
            raise IndexError("a token is not of the vocabulary")
        to = joined + 2 * row * half
        norm_rows(embedding + token * half, hidden, norms[0], to, 1, hidden, eps, element)
        state = address + row * stride * table.itemsize
        norm_rows(state, hidden, norms[1], to + half, 1, hidden, eps, element)


@njit(error_model="numpy")
def product(weight, x, n, output, threads):
    address, of_row, out, width, work = weight
    region, num_threads = threads
    worthwhile = min(num_threads, 1 + out * width // PRODUCTS_OF_THREAD)
    multiply(address, of_row, out, width, x, n, 0, output, work, region, worthwhile)


@njit(error_model="numpy")
def write_keys(cache, slots, parts, sizes):
    """A latent part and a rope part in each row's slot, by their bytes."""
    n, of_latent, of_rope = sizes
    address, num_slots = cache
    slots = array_at(slots, (n,), np.int64(0))
    for row in range(n):
        if not 0 <= slots[row] < num_slots:
            raise IndexError("a row has a slot that the cache has not")
        to = address + slots[row] * (of_latent + of_rope)
        _copy(parts[0] + row * of_latent, to, of_latent)
        _copy(parts[1] + row * of_rope, to + of_latent, of_rope)


@njit(error_model="numpy")
def place_behind(parts, whole, count):
    """Each part from a byte of its row on."""
    source, num_bytes = parts
    target, of_row, offset = whole
    for row in range(count):
        _copy(source + row * num_bytes, target + row * of_row + offset, num_bytes)


@njit(error_model="numpy")
def _copy(source, target, num_bytes):
    array_at(target, (num_bytes,), np.uint8(0))[:] = array_at(source, (num_bytes,), np.uint8(0))
