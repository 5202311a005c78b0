"""DeepSeek-V3's MTP layer on CPU in one compiled call: the compiled operators of its layers, one
after another, with a place in memory for what each makes.

Called one by one from Python they take several times as long as they compute. Compiled code is kept
on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from sglang_ascend.ops.attention import numba as attention
from sglang_ascend.ops.drafts.numba_parts import join_states, place_behind, product, write_keys
from sglang_ascend.ops.drafts.reference import LatentLayer
from sglang_ascend.ops.experts import numba as experts
from sglang_ascend.ops.experts.numba_gating import choose_experts
from sglang_ascend.ops.layers import numba as layers
from sglang_ascend.ops.linear.numba import work_of
from sglang_ascend.ops.linear.numba_heads import multiply_heads
from sglang_ascend.ops.linear.reference import PreparedWeight
from sglang_ascend.ops.numba_cache import njit
from sglang_ascend.ops.numba_floats import FLOATS, array_at, narrow, widen
from sglang_ascend.ops.numba_threads import num_threads, parallel_region

# What ``compiled_layer`` keeps at once, each from the start of a cache line on.
NUM_PLACES, LINE = 8, 64


@dataclass(frozen=True)
class Compiled:
    """What the compiled layer is given of one layer, whatever the rows."""

    # All in the order in which ``compiled_layer`` reads them.
    sizes: np.ndarray  # int64
    norms: np.ndarray  # addresses
    products: np.ndarray  # [products, 5], each as ``numba_parts.product`` takes it
    others: np.ndarray  # addresses of what is neither
    scales: np.ndarray  # float64
    memory: torch.Tensor  # for what the operators make


def accepts_weights(layer: LatentLayer) -> bool:
    """float32 or bfloat16 throughout, contiguous, with products of few rows that are compiled."""
    dtype = layer.embedding.dtype
    given = {field.name: getattr(layer, field.name) for field in fields(layer)}
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    angles, bias = tensors.pop("cos_sin"), tensors.pop("router_bias")
    return (
        dtype in FLOATS
        and angles.dtype in FLOATS
        and bias.dtype == torch.float32
        and all(x.dtype == dtype for x in tensors.values())
        and all(x.is_contiguous() for x in (angles, bias, *tensors.values()))
        and all(x.dense.dtype == dtype and x.most_rows for x in _weights(layer))
    )


def _weights(layer: LatentLayer) -> tuple[PreparedWeight, ...]:
    return (
        layer.join,
        layer.down,
        layer.query_up,
        layer.attention_out,
        layer.router,
        layer.shared_gate_up,
        layer.shared_down,
    )


def prepare(layer: LatentLayer) -> LatentLayer:
    dtype = layer.embedding.dtype
    num_heads, nope_dim, rank = layer.to_latent.shape
    num_experts, hidden_size, expert_size = layer.experts_down.shape
    rope_dim = len(layer.down.dense) - len(layer.query_norm) - rank
    per_token = layer.num_experts_per_token
    of_weights = (weight.most_rows for weight in _weights(layer))
    most_rows = min(experts.MOST_ROWS // per_token, *of_weights)
    sizes = (
        (len(layer.embedding), hidden_size, len(layer.query_norm), rank, rope_dim),
        (num_heads, nope_dim, layer.from_latent.shape[2]),
        (num_experts, expert_size, layer.shared_down.dense.shape[1]),
        (per_token, layer.num_groups, layer.num_kept_groups),
        (*layer.cos_sin.shape, dtype.itemsize),
    )
    norms = (
        layer.token_norm,
        layer.state_norm,
        layer.input_norm,
        layer.query_norm,
        layer.key_norm,
        layer.experts_norm,
        layer.output_norm,
    )
    others = (
        layer.embedding,
        layer.to_latent,
        layer.from_latent,
        layer.cos_sin,
        layer.router_bias,
        layer.experts_gate_up,
        layer.experts_down,
    )
    # No operator makes more columns than these, and there are not twenty of them.
    widest = max(
        2 * hidden_size,
        len(layer.down.dense),
        num_heads * max(nope_dim + rope_dim, rank + rope_dim, layer.from_latent.shape[2]),
        per_token * max(hidden_size, 2 * expert_size),
        len(layer.shared_gate_up.dense),
        num_experts,
    )
    of_place = -(-4 * most_rows * widest // LINE) * LINE
    compiled = Compiled(
        np.array([size for group in sizes for size in group]),
        np.array([norm.data_ptr() for norm in norms]),
        np.array([described(weight, dtype) for weight in _weights(layer)]),
        np.array([tensor.data_ptr() for tensor in others]),
        np.array([layer.eps, layer.latent_eps, layer.routed_scale, layer.attention_scale]),
        torch.empty(NUM_PLACES * of_place, dtype=torch.uint8),
    )
    return replace(layer, most_rows=most_rows, compiled=compiled)


def described(weight: PreparedWeight, dtype: torch.dtype) -> tuple[int, ...]:
    """As ``numba_parts.product`` takes it."""
    rows: Any = weight.rows
    out, width = rows.shape
    return rows.data_ptr(), width * rows.element_size(), out, width, work_of(weight, dtype)


def accepts_rows(
    layer: LatentLayer,
    tokens: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    **sizes: int,
) -> bool:
    """Few, of a prepared layer, in its dtype."""
    whole_numbers = tokens, positions, slots, kv_lens
    return (
        0 < len(tokens) <= layer.most_rows
        and states.dtype == latent_cache.dtype == layer.embedding.dtype
        and states.stride(-1) == 1
        and latent_cache.is_contiguous()
        and all(x.dtype == torch.int64 and x.is_contiguous() for x in whole_numbers)
        and block_table.dtype == torch.int64
        and block_table.stride(1) == 1
    )


def latent_layer(
    layer: LatentLayer,
    tokens: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    query_len: int,
    page_size: int,
) -> torch.Tensor:
    output = states.new_empty(len(tokens), states.shape[1])
    compiled: Compiled = layer.compiled
    dtype = states.dtype
    of_experts = experts.work_of(dtype)
    compiled_layer(
        (compiled.sizes, compiled.norms, compiled.products, compiled.others, compiled.scales),
        (tokens.data_ptr(), positions.data_ptr(), slots.data_ptr(), len(tokens), query_len),
        (states.data_ptr(), states.stride(0)),
        (latent_cache.data_ptr(), len(latent_cache)),
        (block_table.data_ptr(), block_table.stride(0), page_size),
        (kv_lens.data_ptr(), len(kv_lens)),
        (output.data_ptr(), compiled.memory.data_ptr(), compiled.memory.numel() // NUM_PLACES),
        (attention.work_of(dtype), of_experts, parallel_region(), num_threads()),
        FLOATS[dtype],
        FLOATS[layer.cos_sin.dtype],
    )
    return output


@njit(nogil=True, error_model="numpy")
def compiled_layer(layer, rows, states, cache, pages, lengths, memory, threads, element, angle):
    sizes, norms, products, others, scales = layer
    tokens, positions, slots, n, query_len = rows
    output, start, place = memory
    of_attention, of_experts, region, num_threads = threads
    vocab_size, hidden, q_rank, rank, rope, heads, nope, v_dim = sizes[:8]
    num_angles, num_columns, size = sizes[14:17]
    eps, latent_eps, _, attention_scale = scales
    on_threads = (region, num_threads)
    # Places of memory: each holds what is named behind it below, one after another.
    a, b, c, d = start, start + place, start + 2 * place, start + 3 * place
    e, f, g, h = start + 4 * place, start + 5 * place, start + 6 * place, start + 7 * place

    # a: token and state; b: what they are joined to, which stays.
    join_states(
        others[0], vocab_size, tokens, states, (norms[0], norms[1]), a, (n, hidden), eps, element
    )
    product(products[0], a, n, b, on_threads)

    # c: normed; d: query, latent and key's rope part, beside each other; c: the query, normed.
    layers.norm_rows(b, hidden, norms[2], c, n, hidden, eps, element)
    width = q_rank + rank + rope
    product(products[1], c, n, d, on_threads)
    layers.norm_rows(d, width, norms[3], c, n, q_rank, latent_eps, element)
    # e: the query; f: the key's latent part; g and h: both rope parts, turned.
    product(products[2], c, n, e, on_threads)
    layers.norm_rows(d + q_rank * size, width, norms[4], f, n, rank, latent_eps, element)
    of_query = (e + nope * size, heads * (nope + rope), nope + rope, heads, g)
    of_key = (d + (q_rank + rank) * size, width, rope, 1, h)
    angles = (others[3], num_angles, num_columns)
    layers.rotate_pairs(of_query, of_key, (positions, n, rope), angles, angle, element)
    write_keys(cache, slots, (f, h), (n, rank * size, rope * size))
    # a: the query in the latent space, its rope part behind it; c: what it attends to; d: values.
    to_latent = (others[1], heads, nope, rank)
    of_query = (e, heads * (nope + rope), nope + rope)
    multiply_heads(of_query, to_latent, (a, heads * (rank + rope), rank + rope), n, element)
    place_behind((g, rope * size), (a, (rank + rope) * size, rank * size), n * heads)
    attention.attend(
        (a, c, query_len, heads, rank + rope),
        (cache[0], cache[0], cache[1], 1, rank + rope, rank),
        pages,
        lengths,
        attention_scale,
        (of_attention, region, num_threads),
    )
    from_latent = (others[2], heads, rank, v_dim)
    multiply_heads((c, heads * rank, rank), from_latent, (d, heads * v_dim, v_dim), n, element)
    product(products[3], d, n, c, on_threads)

    # e: normed; f: the sum, which stays.
    layers.add_and_norm_rows(c, b, norms[5], e, f, n, hidden, eps, element)
    of_experts = (of_experts, region, num_threads)
    _mixture(layer, e, n, (a, b, c, d, g, h), of_experts, element)
    layers.add_and_norm_rows(a, f, norms[6], output, b, n, hidden, eps, element)


@njit(error_model="numpy")
def _mixture(layer, x, n, places, threads, element):
    """The experts of each row of ``x`` and the shared one, in the first of the places."""
    sizes, _, products, others, scales = layer
    a, b, c, d, g, h = places
    _, region, num_threads = threads
    on_threads = (region, num_threads)
    hidden, size = sizes[1], sizes[16]
    num_experts, expert_size, shared_size, per_token, groups, kept_groups = sizes[8:14]
    copies = n * per_token
    # a: scores in the weights' dtype; b: as float32; c: shares and, behind them, experts.
    product(products[4], x, n, a, on_threads)
    scores = array_at(a, (n * num_experts,), element)
    wide = array_at(b, (n * num_experts,), np.float32(0))
    for i in range(len(scores)):
        wide[i] = widen(scores[i])
    ids, counts = c + 4 * copies, np.empty(num_experts, np.int64)
    of_choice = (n, num_experts, per_token, groups, kept_groups)
    choose_experts((b, others[4], c, ids), of_choice, 1.0, np.float32(0))
    # d: a copy of a row for each of its experts; g: where they went.
    counted = np.int64(counts.ctypes.data)
    of_rows = (x, hidden * size, d)
    experts.copy_to_experts(of_rows, (ids, n, per_token, num_experts), (g, counted))
    gate_up = (others[5], counted, num_experts, 2 * expert_size)
    experts.multiply_groups((d, copies, hidden), gate_up, h, threads)
    layers.gate_rows(h, d, copies, expert_size, element)
    down = (others[6], counted, num_experts, hidden)
    experts.multiply_groups((d, copies, expert_size), down, h, threads)
    counts[0] = 0  # until here its memory is read
    experts.sum_of_experts((h, c, g, a), (n, per_token, hidden), element, np.float32(0))
    # h and d: the shared expert's.
    product(products[5], x, n, h, on_threads)
    layers.gate_rows(h, d, n, shared_size, element)
    product(products[6], d, n, h, on_threads)
    routed = array_at(a, (n * hidden,), element)
    shared = array_at(h, (n * hidden,), element)
    scale = np.float32(scales[2])
    for i in range(len(routed)):
        scaled = widen(narrow(widen(routed[i]) * scale, element))
        routed[i] = narrow(scaled + widen(shared[i]), element)
