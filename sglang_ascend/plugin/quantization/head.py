"""A quantized head: the target's, and what the MTP layer shares or cuts out of it."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ascend.ops import linear
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.quantization.linear import QuantizedLinear
from sglang_ascend.quantization.product import prepare
from sglang_ascend.quantization.rows import from_rows
from sglang_ascend.quantization.weight import QuantizedWeight, dense


class QuantizedHead(QuantizedLinear):
    """Of a ``ParallelLMHead``, whose rows are split between ranks, and padded.

    Quantized rows stay on the host, for heads that are cut out of it: its product holds them too.
    """

    weight: torch.Tensor | QuantizedWeight
    device: torch.device

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.collected:
            (loaded,) = self.collected.values()
            self.collected = {}
            rows = _rows_of_rank(loaded, layer)
            is_float = loaded.is_floating_point()
            self.device = layer.weight.device
            self._serve(rows.to(self.device, self.dtype) if is_float else from_rows(rows))
        elif self.product is None:
            raise ValueError(f"{self.prefix} got no weight; the checkpoint lacks it.")

    def cut(self, token_ids: torch.Tensor) -> QuantizedHead:
        """The head of these tokens alone, int64 [draft_vocab_size]: a copy of their rows."""
        head = QuantizedHead(self.prefix)
        head.dtype, head.device = self.dtype, self.device
        head._serve(self._selected(token_ids))
        return head

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Their values, float32 [tokens, hidden_size]."""
        return dense(self._selected(token_ids)).float()

    def _selected(self, token_ids: torch.Tensor) -> torch.Tensor | QuantizedWeight:
        weight = self.weight
        if isinstance(weight, torch.Tensor):
            return weight[token_ids]
        return weight.selected(token_ids.to(weight.codes.device))

    def _serve(self, weight: torch.Tensor | QuantizedWeight) -> None:
        self.weight = weight
        if isinstance(weight, torch.Tensor):  # an update brought it
            prepared = linear.prepare(weight)
            self.product = lambda x, bias: linear.linear(x, prepared, bias)
        else:
            needs_body = device_profile().captures_step
            self.product = prepare(weight.to(self.device), self.dtype, needs_body=needs_body)


def _rows_of_rank(rows: torch.Tensor, layer: Any) -> torch.Tensor:
    """The last row again where SGLang pads: it drops the logits of padding."""
    own = layer.shard_indices
    rows = rows[own.org_vocab_start_index : own.org_vocab_end_index]
    missing = layer.num_embeddings_per_partition - len(rows)
    return torch.cat([rows, rows[-1:].expand(missing, -1)]) if missing else rows
