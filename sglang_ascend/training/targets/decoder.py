"""The target decoding one token per row and step, each row at a position of its own."""

from __future__ import annotations

import torch

from sglang_ascend.training.targets.families import Target

Tensor = torch.Tensor


class RowCache:
    """Keys and values of every layer, [rows, heads, max_length, dim] each.

    transformers calls `update` in each layer; the row and position that a step writes are the
    decoder's, which is what transformers' own caches cannot do.
    """

    def __init__(self, rows: int, max_length: int) -> None:
        self.rows, self.max_length = torch.arange(rows), max_length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.positions, self.length = self.rows, 0

    def begin(self, positions: Tensor) -> int:
        """Sets where the next step writes, [rows]; returns how many positions it may see."""
        self.positions, self.length = positions, int(positions.max()) + 1
        return self.length

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Stores [rows, heads, 1, dim] and returns all stored positions of the layer."""
        if layer not in self.layers:
            rows, heads = keys.shape[:2]
            self.layers[layer] = (
                keys.new_zeros(rows, heads, self.max_length, keys.shape[-1]),
                values.new_zeros(rows, heads, self.max_length, values.shape[-1]),
            )
        for stored, new in zip(self.layers[layer], (keys, values), strict=True):
            stored[self.rows, :, self.positions] = new[:, :, 0]
        all_keys, all_values = self.layers[layer]
        return all_keys[:, :, : self.length], all_values[:, :, : self.length]

    @torch.inference_mode()
    def share_prefix(self, length: int) -> None:
        """Copies row 0's first `length` positions to every row."""
        for pair in self.layers.values():
            for stored in pair:
                stored[:, :, :length] = stored[:1, :, :length].clone()


class Decoder:
    """A target in `dtype` with room for `rows` sequences of at most `max_length` tokens."""

    def __init__(
        self, target: Target, rows: int, max_length: int, dtype: torch.dtype = torch.float32
    ) -> None:
        model = target.load_model(dtype)
        self.model, self.head = model.model, model.lm_head
        self.cache = RowCache(rows, max_length)

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feeds `tokens` [rows] at `positions` [rows]; returns the hidden after the final norm.

        Row r attends to its own cached positions 0..positions[r].
        """
        length = self.cache.begin(positions)
        mask = (torch.arange(length) <= positions[:, None])[:, None, None]  # [rows, 1, 1, length]
        output = self.model(
            tokens[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, 0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] of `hidden` [rows, hidden_size]."""
        return self.head(hidden)
