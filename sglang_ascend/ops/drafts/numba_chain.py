"""A chain of drafts on CPU in one compiled call: layer, head and largest logit, draft by draft."""

from __future__ import annotations

import numpy as np
import torch

from sglang_ascend.ops.attention import numba as attention
from sglang_ascend.ops.drafts import numba_latent
from sglang_ascend.ops.drafts.numba_latent import NUM_PLACES, Compiled, compiled_layer
from sglang_ascend.ops.drafts.numba_parts import product
from sglang_ascend.ops.drafts.reference import LatentLayer
from sglang_ascend.ops.experts import numba as experts
from sglang_ascend.ops.linear.reference import PreparedWeight
from sglang_ascend.ops.numba_cache import njit
from sglang_ascend.ops.numba_floats import FLOATS, array_at, widen
from sglang_ascend.ops.numba_threads import num_threads, parallel_region


def accepts_rows(
    layer: LatentLayer,
    head: PreparedWeight,
    tokens: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    **sizes: int,
) -> bool:
    """As the layer's, of a head in its dtype that multiplies as few."""
    of_drafts = positions, slots, kv_lens
    return (
        head.dense.dtype == states.dtype
        and len(tokens) <= head.most_rows
        and all(x.is_contiguous() and x.shape == positions.shape for x in of_drafts)
        and numba_latent.accepts_rows(
            layer, tokens, states, positions, latent_cache, slots, block_table, kv_lens
        )
    )


def latent_chain(
    layer: LatentLayer,
    head: PreparedWeight,
    tokens: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    page_size: int,
    vocab_size: int,
) -> torch.Tensor:
    compiled: Compiled = layer.compiled
    dtype, (num_drafts, batch_size) = states.dtype, positions.shape
    drafts = tokens.new_empty(num_drafts, batch_size)
    hidden = states.new_empty(batch_size, states.shape[1])
    logits = states.new_empty(batch_size, len(head.dense))
    _chain(
        (compiled.sizes, compiled.norms, compiled.products, compiled.others, compiled.scales),
        (numba_latent.described(head, dtype), logits.data_ptr(), logits.shape[1], vocab_size),
        (num_drafts, batch_size, drafts.data_ptr()),
        (tokens.data_ptr(), positions.data_ptr(), slots.data_ptr(), kv_lens.data_ptr()),
        (states.data_ptr(), states.stride(0)),
        (latent_cache.data_ptr(), len(latent_cache)),
        (block_table.data_ptr(), block_table.stride(0), page_size),
        (hidden.data_ptr(), compiled.memory.data_ptr(), compiled.memory.numel() // NUM_PLACES),
        (attention.work_of(dtype), experts.work_of(dtype), parallel_region(), num_threads()),
        FLOATS[dtype],
        FLOATS[layer.cos_sin.dtype],
    )
    return drafts


@njit(nogil=True, error_model="numpy")
def _chain(layer, head, drafts, rows, states, cache, pages, memory, threads, element, angle):
    num_drafts, n, drafted = drafts
    tokens, positions, slots, lengths = rows
    weight, logits, num_logits, vocab_size = head
    hidden, _, _ = memory
    of_draft = 8 * n
    for j in range(num_drafts):
        at = j * of_draft
        of_rows = (tokens, positions + at, slots + at, n, 1)
        compiled_layer(
            *(layer, of_rows, states, cache, pages, (lengths + at, n)),
            *(memory, threads, element, angle),
        )
        product(weight, hidden, n, logits, (threads[2], threads[3]))
        tokens, states = drafted + at, (hidden, layer[0][1])
        _take_likeliest(logits, num_logits, vocab_size, tokens, n, element)


@njit(error_model="numpy")
def _take_likeliest(logits, num_logits, vocab_size, tokens, n, element):
    """The first of the largest."""
    rows = array_at(logits, (n, num_logits), element)
    chosen = array_at(tokens, (n,), np.int64(0))
    for row in range(n):
        best, largest = 0, widen(rows[row, 0])
        for token in range(1, vocab_size):
            logit = widen(rows[row, token])
            if logit > largest:
                best, largest = token, logit
        chosen[row] = best
