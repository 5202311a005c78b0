"""Definition of DeepSeek-V3's MTP layer over the rows of a step (arXiv 2412.19437, 2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_ascend.ops.attention.reference import paged_mla
from sglang_ascend.ops.experts.reference import gating, grouped_matmul, permute, unpermute
from sglang_ascend.ops.layers.reference import add_rms_norm, rms_norm, rotate_interleaved, swiglu
from sglang_ascend.ops.linear.reference import PreparedWeight, by_head, linear
from sglang_ascend.ops.sampling.reference import greedy


@dataclass(frozen=True)
class LatentLayer:
    """Weights of one dtype, and what an implementation made of them."""

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    token_norm: torch.Tensor  # [hidden_size], as all norms but two
    state_norm: torch.Tensor
    join: PreparedWeight  # [hidden_size, 2 * hidden_size], of token and state
    input_norm: torch.Tensor
    down: PreparedWeight  # [q_lora_rank + kv_lora_rank + rope_dim, hidden_size]
    query_norm: torch.Tensor  # [q_lora_rank]
    query_up: PreparedWeight  # [heads * (nope_dim + rope_dim), q_lora_rank]
    key_norm: torch.Tensor  # [kv_lora_rank]
    to_latent: torch.Tensor  # [heads, nope_dim, kv_lora_rank]
    from_latent: torch.Tensor  # [heads, kv_lora_rank, v_head_dim]
    cos_sin: torch.Tensor  # [max_positions, rope_dim], float of any dtype
    attention_out: PreparedWeight  # [hidden_size, heads * v_head_dim]
    experts_norm: torch.Tensor
    router: PreparedWeight  # [experts, hidden_size]
    router_bias: torch.Tensor  # [experts], float32
    experts_gate_up: torch.Tensor  # [experts, 2 * expert_size, hidden_size]
    experts_down: torch.Tensor  # [experts, hidden_size, expert_size]
    shared_gate_up: PreparedWeight  # [2 * shared_size, hidden_size]
    shared_down: PreparedWeight  # [hidden_size, shared_size]
    output_norm: torch.Tensor
    eps: float  # of the norms of width hidden_size
    latent_eps: float  # of the other two
    num_experts_per_token: int
    num_groups: int
    num_kept_groups: int
    routed_scale: float
    attention_scale: float
    most_rows: int = 0  # that a compiled layer takes
    compiled: Any = None

    @property
    def device(self) -> torch.device:
        """Where its operators run."""
        return self.embedding.device


def prepare_latent(layer: LatentLayer) -> LatentLayer:
    """To be called again after a change of weights. Without a compiled layer ``most_rows`` is 0."""
    return layer


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
    """The layer's hidden states behind its last norm, [rows, hidden_size].

    Args:
        layer: what ``prepare_latent`` returned.
        tokens: int64 [rows], rows being batch * query_len.
        states: [rows, hidden_size] in the dtype of the weights: of the token before each.
        positions: int64 [rows].
        latent_cache: [slots, 1, kv_lora_rank + rope_dim] in that dtype; the rows' keys are written.
        slots: int64 [rows], where.
        block_table, kv_lens, query_len, page_size: as in ``ops.attention.reference.paged_gqa``,
            ``kv_lens`` with the rows themselves.

    Does not synchronise.
    """
    token = rms_norm(layer.embedding[tokens], layer.token_norm, layer.eps)
    state = rms_norm(states, layer.state_norm, layer.eps)
    joined = linear(torch.cat((token, state), dim=-1), layer.join)

    num_heads, nope_dim, rank = layer.to_latent.shape
    q_rank, rope_dim = len(layer.query_norm), latent_cache.shape[-1] - rank
    down = linear(rms_norm(joined, layer.input_norm, layer.eps), layer.down)
    query, latent, key_rope = down.split((q_rank, rank, rope_dim), dim=-1)
    query = linear(rms_norm(query, layer.query_norm, layer.latent_eps), layer.query_up)
    query, query_rope = query.view(len(tokens), num_heads, -1).split((nope_dim, rope_dim), dim=-1)
    rotated = rotate_interleaved(query_rope, key_rope[:, None], positions, layer.cos_sin)
    query_rope, key_rope = rotated
    key = rms_norm(latent, layer.key_norm, layer.latent_eps)
    latent_cache[slots] = torch.cat((key[:, None], key_rope), dim=-1)
    attended = paged_mla(
        torch.cat((by_head(query, layer.to_latent), query_rope), dim=-1),
        latent_cache,
        block_table,
        kv_lens,
        query_len=query_len,
        page_size=page_size,
        scale=layer.attention_scale,
        kv_lora_rank=rank,
    )
    values = by_head(attended, layer.from_latent).flatten(1)
    attended = linear(values, layer.attention_out)

    normed, residual = add_rms_norm(attended, joined, layer.experts_norm, layer.eps)
    mixed = _mixture(layer, normed)
    return add_rms_norm(mixed, residual, layer.output_norm, layer.eps)[0]


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
    """The likeliest drafts of the layer on its own output (FastMTP, arXiv 2509.18362), int64
    [drafts, batch].

    Args:
        head: [at least vocab_size, hidden_size], in the dtype of the layer.
        tokens, states: of the last draft, int64 [batch] and [batch, hidden_size].
        positions, slots, kv_lens: int64 [drafts, batch], of the row of each forward.
        vocab_size: rows of the head behind these are padding.

    The others are ``latent_layer``'s. Does not synchronise.
    """
    drafted = []
    for position, slot, kv_len in zip(positions, slots, kv_lens, strict=True):
        states = latent_layer(
            layer,
            tokens,
            states,
            position,
            latent_cache,
            slot,
            block_table,
            kv_len,
            query_len=1,
            page_size=page_size,
        )
        tokens = greedy(linear(states, head)[:, :vocab_size].float())
        drafted.append(tokens)
    return torch.stack(drafted)


def _mixture(layer: LatentLayer, x: torch.Tensor) -> torch.Tensor:
    """The chosen experts' weighted sum, scaled, and the shared expert."""
    weights, ids = gating(
        linear(x, layer.router).float(),
        layer.router_bias,
        num_experts_per_token=layer.num_experts_per_token,
        num_groups=layer.num_groups,
        num_kept_groups=layer.num_kept_groups,
        scale=1.0,
    )
    copies, places, counts = permute(x, ids, num_experts=len(layer.experts_gate_up))
    inner = swiglu(grouped_matmul(copies, layer.experts_gate_up.mT, counts))
    routed = unpermute(grouped_matmul(inner, layer.experts_down.mT, counts), weights, places)
    shared = linear(swiglu(linear(x, layer.shared_gate_up)), layer.shared_down)
    return routed * layer.routed_scale + shared
