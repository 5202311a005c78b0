"""The target decoding one token per row and step, each row at a position of its own."""

from __future__ import annotations

import torch

from sglang_ascend.ops.attention import paged_gqa
from sglang_ascend.training.targets.device import CPU
from sglang_ascend.training.targets.families import ATTENTION, Target

Tensor = torch.Tensor
PAGED = "paged"  # the name under which transformers finds `paged_attention`


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
    pages = torch.arange(len(query), device=query.device)[:, None]
    caches = (stored.transpose(1, 2).flatten(0, 1) for stored in (key, value))
    page_size = key.shape[2]
    out = paged_gqa(
        query[:, :, 0], *caches, pages, kv_lens, query_len=1, page_size=page_size, scale=scaling
    )
    return out[:, None], None


class RowCache:
    """Keys and values of every layer, [rows, max_length, heads, dim] each.

    transformers calls `update` in each layer; the row and position that a step writes are the
    decoder's, which is what transformers' own caches cannot do.
    """

    def __init__(self, rows: int, max_length: int, device: torch.device = CPU) -> None:
        self.rows, self.max_length = torch.arange(rows, device=device), max_length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.positions, self.length = self.rows, 0

    def begin(self, positions: Tensor, length: int) -> None:
        """Sets where the next step writes, [rows], and how many positions it is shown."""
        self.positions, self.length = positions, length

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Stores [rows, heads, 1, dim]; returns the layer's [rows, heads, length, dim]."""
        if layer not in self.layers:
            rows, heads = keys.shape[:2]
            self.layers[layer] = (
                keys.new_zeros(rows, self.max_length, heads, keys.shape[-1]),
                values.new_zeros(rows, self.max_length, heads, values.shape[-1]),
            )
        for stored, new in zip(self.layers[layer], (keys, values), strict=True):
            stored[self.rows, self.positions] = new[:, :, 0]
        all_keys, all_values = self.layers[layer]
        return (
            all_keys[:, : self.length].transpose(1, 2),
            all_values[:, : self.length].transpose(1, 2),
        )

    @torch.inference_mode()
    def share_prefix(self, length: int) -> None:
        """Copies row 0's first `length` positions to every row."""
        for pair in self.layers.values():
            for stored in pair:
                stored[:, :length] = stored[:1, :length].clone()


class Decoder:
    """A target in `dtype` with room for `rows` sequences of at most `max_length` tokens."""

    def __init__(
        self, target: Target, rows: int, max_length: int, dtype: torch.dtype = torch.float32
    ) -> None:
        import transformers

        model = target.load_model(dtype)
        self.model, self.head = model.model, model.lm_head
        self.device = target.device
        self.cache = RowCache(rows, max_length, self.device)
        # Latent attention makes its keys of what the cache holds: `ATTENTION` is for that.
        self.pages = not hasattr(model.config, "kv_lora_rank")
        transformers.AttentionInterface.register(PAGED, paged_attention)
        model.config._attn_implementation = PAGED if self.pages else ATTENTION

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feeds `tokens` [rows] at `positions` [rows]; returns the hidden after the final norm.

        Row r attends to its own cached positions 0..positions[r]. Both may lie on the CPU; the
        hidden is on the target's device.
        """
        length = 1 if self.pages else int(positions.max()) + 1
        positions = positions.to(self.device)
        self.cache.begin(positions, self.cache.max_length if self.pages else length)
        seen = torch.arange(length, device=self.device) <= positions[:, None]
        mask = seen[:, None, None]  # [rows, 1, 1, length]
        output = self.model(
            tokens.to(self.device)[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
            kv_lens=positions + 1,
        )
        return output.last_hidden_state[:, 0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] of `hidden` [rows, hidden_size]."""
        return self.head(hidden)
