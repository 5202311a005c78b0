"""What a trainable MTP layer offers, and the attention rule of its recursion.

`loss`, `trainer` and `acceptance` use only this; `targets.layer` implements it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Protocol

import torch

Tensor = torch.Tensor


@dataclass
class ChainCache:
    """Keys and values of the steps done so far, for one batch of sequences.

    `steps[j]` holds what the layer stored in step j + 1, two tensors [batch, heads, slots, dim].
    transformers' attention calls `update` once in each forward, as it does with its own caches.
    """

    steps: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Number, from 1, of the step that the next forward computes."""
        return len(self.steps) + 1

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        """Adds one step; returns all steps' keys and values, joined along the slots."""
        self.steps.append((keys, values))
        every_key, every_value = zip(*self.steps, strict=True)
        return torch.cat(every_key, 2), torch.cat(every_value, 2)


def chain_mask(num_slots: int, step: int, device: torch.device | str = "cpu") -> Tensor:
    """Which keys the queries of `step` may see: bool [num_slots, step * num_slots].

    Keys are concatenated by step, oldest first. Slot i's query sees the step-1 keys of slots
    0..i and, of each step 2..`step`, only slot i's own key: when the chain that starts at slot i
    is drafted, all earlier slots hold step-1 keys, computed from the target's hiddens.
    """
    causal = torch.ones(num_slots, num_slots, dtype=torch.bool, device=device).tril()
    own = torch.eye(num_slots, dtype=torch.bool, device=device)
    return torch.cat([causal] + [own] * (step - 1), 1)


class ChainLayer(Protocol):
    """A trainable MTP layer, without embedding and head (the target's, frozen).

    Slot i of a sequence pairs the hidden at position i with the embedding of token i + 1 and
    predicts token i + 2. In step k (from 1) slot i sits at position i + k - 1, takes the
    embedding of token i + k and predicts token i + k + 1; its hidden input is the target's hidden
    (after the final norm) at position i in step 1, the layer's own output of step k - 1 later.
    """

    def __call__(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, cache: ChainCache
    ) -> Tensor:
        """One step for every slot of every sequence.

        Args:
            hidden: [batch, slots, hidden_size], the target's or the previous step's output.
            embeddings: [batch, slots, hidden_size], of the tokens named above.
            positions: int64 [slots], rotary positions of this step.
            cache: keys and values of the earlier steps; receives this step's.

        Returns:
            [batch, slots, hidden_size] after the layer's last norm: input of the head and of the
            next step. Queries attend by `chain_mask(slots, cache.step)`; sequences in a batch are
            right-padded, which a causal mask makes harmless.
        """
        ...


def run_chain(
    layer: ChainLayer,
    hidden: Tensor,
    tokens: Tensor,
    embedding: Tensor,
    num_steps: int,
    num_slots: int | None = None,
) -> list[Tensor]:
    """Teacher-forced recursion over whole sequences.

    Args:
        hidden: [batch, length, hidden_size], the target's hidden at every position.
        tokens: int64 [batch, length].
        embedding: [vocabulary, hidden_size].
        num_slots: the first so many of each step; without it all, length - 1.

    Returns:
        per step k (from 1) the outputs [batch, num_slots, hidden_size]; slot i of step k predicts
        token i + k + 1. Slots with i + k >= length saw a padding token: leave them out.
    """
    num_slots = tokens.shape[1] - 1 if num_slots is None else num_slots
    padded = torch.nn.functional.pad(tokens, (0, num_steps))
    cache, outputs, state = ChainCache(), [], hidden[:, :num_slots]
    slots = torch.arange(num_slots, device=tokens.device)
    for step in range(1, num_steps + 1):
        inputs = embedding[padded[:, step : step + num_slots]]
        state = layer(state, inputs, slots + step - 1, cache)
        outputs.append(state)
    return outputs


def in_dtype(layer: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """`layer`, or a copy whose parameters have `dtype`; buffers, such as the rotary frequencies,
    stay as they are."""
    if dtype == torch.float32:
        return layer
    worker = copy.deepcopy(layer)
    for parameter in worker.parameters():
        parameter.data = parameter.data.to(dtype)
    return worker
