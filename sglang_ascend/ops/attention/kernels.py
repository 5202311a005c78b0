"""The two loops over paged keys and values that Numba compiles; arrays are NumPy's.

Importing this module compiles nothing; the first call does, and keeps the result on disk.
"""

from __future__ import annotations

import numba
import numpy as np

# Sums in any order and fused products, so that loops become vectors; infinities stay infinities.
FAST = {"reassoc", "contract", "nsz", "arcp"}


@numba.njit(cache=True, fastmath=FAST, nogil=True, error_model="numpy")
def scores(query, key_cache, block_table, kv_lens, page_size, weights):
    """weights[b, h, i, g, j] = query[b, h, i, g] . key j of request b, where row i sees key j.

    query: [batch, kv_heads, query_len, group, dim], key_cache: [slots, kv_heads, dim],
    weights: [batch, kv_heads, query_len, group, max_kv_len]; -inf where a row sees no key.
    """
    batch_size, num_kv_heads, query_len, group, dim = query.shape
    for b in range(batch_size):
        for h in range(num_kv_heads):
            for i in range(query_len):
                first_unseen = kv_lens[b] - query_len + i + 1
                weights[b, h, i, :, first_unseen:] = np.float32(-np.inf)
        for j in range(kv_lens[b]):
            slot = block_table[b, j // page_size] * page_size + j % page_size
            first_row = max(0, j - (kv_lens[b] - query_len))  # the first that sees key j
            for h in range(num_kv_heads):
                for i in range(first_row, query_len):
                    for g in range(group):
                        total = np.float32(0.0)
                        for d in range(dim):
                            total += query[b, h, i, g, d] * key_cache[slot, h, d]
                        weights[b, h, i, g, j] = total


@numba.njit(cache=True, fastmath=FAST, nogil=True, error_model="numpy")
def weighted_values(weights, value_cache, block_table, kv_lens, page_size, output):
    """output[b, h, i, g] += sum over j of weights[b, h, i, g, j] value j of request b.

    Shapes as in ``scores``; output: [batch, kv_heads, query_len, group, value_dim].
    """
    batch_size, num_kv_heads, query_len, group, dim = output.shape
    for b in range(batch_size):
        for j in range(kv_lens[b]):
            slot = block_table[b, j // page_size] * page_size + j % page_size
            for h in range(num_kv_heads):
                for i in range(query_len):
                    for g in range(group):
                        weight = weights[b, h, i, g, j]
                        for d in range(dim):
                            output[b, h, i, g, d] += weight * value_cache[slot, h, d]
