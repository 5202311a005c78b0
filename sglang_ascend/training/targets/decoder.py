"""The target decoding one token per row and step, each row at a position of its own."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ascend.ops.attention import paged_gqa, paged_mla
from sglang_ascend.training.targets.device import CPU
from sglang_ascend.training.targets.families import Target

Tensor = torch.Tensor
# The names under which transformers finds `paged_attention` and `latent_attention`.
PAGED, LATENT = "paged", "latent"


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    *,
    kv_lens: Tensor,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of one token per row to as many of the row's positions as it has, and no others:
    a mask would have every row read as far as the longest.

    Args:
        query: [rows, heads, 1, dim]; key, value: [rows, kv_heads, max_length, dim] of a
            `RowCache`, whose rows are pages of `max_length` positions.
        kv_lens: int64 [rows], how many positions of each row count.

    Returns:
        [rows, 1, heads, dim], and no weights.
    """
    caches = (stored.transpose(1, 2).flatten(0, 1) for stored in (key, value))
    pages, page_size = _pages(query), key.shape[2]
    out = paged_gqa(
        query[:, :, 0], *caches, pages, kv_lens, query_len=1, page_size=page_size, scale=scaling
    )
    return out[:, None], None


def latent_attention(
    module: Any,
    query: Tensor,
    latent: Tensor,
    rope: Tensor,
    attention_mask: Tensor,
    scaling: float,
    *,
    kv_lens: Tensor,
    **_: object,
) -> tuple[Tensor, None]:
    """As `paged_attention` by the latent cache: queries are taken to the latent space, and what
    they attend to is brought back from it, as SGLang serves it. transformers makes keys and values
    of every position anew in each step.

    Args:
        query: [rows, heads, 1, qk_nope_head_dim + qk_rope_head_dim].
        latent: [rows, 1, max_length, kv_lora_rank + qk_rope_head_dim], of a `LatentCache`.
        rope: [rows, 1, 1, qk_rope_head_dim], which `latent` holds already.

    Returns:
        [rows, 1, heads, v_head_dim], and no weights.
    """
    absorbed: Absorbed = module.expand_kv
    nope, rotated = query[:, :, 0].split((absorbed.keys.shape[1], rope.shape[-1]), dim=-1)
    out = paged_mla(
        torch.einsum("rhn,hnl->rhl", nope, absorbed.keys),
        latent.transpose(1, 2).flatten(0, 1),
        _pages(query),
        kv_lens,
        query_len=1,
        page_size=latent.shape[2],
        scale=scaling,
        kv_lora_rank=absorbed.keys.shape[2],
        query_rope=rotated,
    )
    return torch.einsum("rhl,hvl->rhv", out, absorbed.values)[:, None], None


def _pages(query: Tensor) -> Tensor:
    """The block table of a cache in which each row is a page."""
    return torch.arange(len(query), device=query.device)[:, None]


class Absorbed:
    """In place of an attention's `expand_kv`: leaves what the cache holds as it is, and keeps what
    `latent_attention` multiplies by instead, of `kv_b_proj` [heads * (nope + v), kv_lora_rank].

    Attributes:
        keys: [heads, qk_nope_head_dim, kv_lora_rank]; values: [heads, v_head_dim, kv_lora_rank].
    """

    def __init__(self, kv_b_proj: Tensor, heads: int, qk_nope_head_dim: int) -> None:
        halves = kv_b_proj.view(heads, -1, kv_b_proj.shape[1])
        self.keys, self.values = halves[:, :qk_nope_head_dim], halves[:, qk_nope_head_dim:]

    def __call__(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        return latent, rope


class RowCache:
    """Keys and values of every layer, [rows, max_length, heads, dim] each.

    transformers calls `update` in each layer; the row and position that a step writes are the
    decoder's, which is what transformers' own caches cannot do.
    """

    def __init__(self, rows: int, max_length: int, device: torch.device = CPU) -> None:
        self.rows, self.max_length = torch.arange(rows, device=device), max_length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.positions = self.rows

    def begin(self, positions: Tensor) -> None:
        """Sets where the next step writes, [rows]."""
        self.positions = positions

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Stores [rows, heads, 1, dim]; returns the layer's [rows, heads, max_length, dim]."""
        if layer not in self.layers:
            rows, heads = keys.shape[:2]
            self.layers[layer] = (
                keys.new_zeros(rows, self.max_length, heads, keys.shape[-1]),
                values.new_zeros(rows, self.max_length, heads, values.shape[-1]),
            )
        for stored, new in zip(self.layers[layer], (keys, values), strict=True):
            stored[self.rows, self.positions] = new[:, :, 0]
        all_keys, all_values = self.layers[layer]
        return all_keys.transpose(1, 2), all_values.transpose(1, 2)

    @torch.inference_mode()
    def share_prefix(self, length: int) -> None:
        """Copies row 0's first `length` positions to every row."""
        for pair in self.layers.values():
            for stored in pair:
                stored[:, :length] = stored[:1, :length].clone()


class LatentCache(RowCache):
    """Latents with their rotated keys behind them, one head, where a `RowCache` holds the keys."""

    def update(self, latent: Tensor, rope: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        joined = torch.cat((latent, rope), dim=-1)
        return super().update(joined, rope[..., :0], layer)[0], rope


class Decoder:
    """A target in `dtype` with room for `rows` sequences of at most `max_length` tokens."""

    def __init__(
        self, target: Target, rows: int, max_length: int, dtype: torch.dtype = torch.float32
    ) -> None:
        import transformers

        model = target.load_model(dtype)
        self.model, self.head = model.model, model.lm_head
        self.device = target.device
        is_latent = hasattr(model.config, "kv_lora_rank")
        self.cache = (LatentCache if is_latent else RowCache)(rows, max_length, self.device)
        if is_latent:
            _absorb(target, model)
        transformers.AttentionInterface.register(PAGED, paged_attention)
        transformers.AttentionInterface.register(LATENT, latent_attention)
        model.config._attn_implementation = LATENT if is_latent else PAGED

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feeds `tokens` [rows] at `positions` [rows]; returns the hidden after the final norm.

        Row r attends to its own cached positions 0..positions[r]. Both may lie on the CPU; the
        hidden is on the target's device.
        """
        positions = positions.to(self.device)[:, None]
        self.cache.begin(positions[:, 0])
        output = self.model(
            tokens.to(self.device)[:, None],
            # One, so that transformers makes none: `kv_lens` says what is seen.
            attention_mask=torch.ones_like(positions, dtype=torch.bool)[:, None, None],
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            kv_lens=positions[:, 0] + 1,
        )
        return output.last_hidden_state[:, 0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] of `hidden` [rows, hidden_size]."""
        return self.head(hidden)


def _absorb(target: Target, model: Any) -> None:
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        name = f"model.layers.{number}.self_attn.kv_b_proj.weight"
        weight = target.read([name])[name].to(target.device, model.dtype)
        attention.expand_kv = Absorbed(weight, attention.num_heads, attention.qk_nope_head_dim)
