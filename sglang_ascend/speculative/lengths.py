"""Chains of other lengths than K: where they end, and the rows that they are verified in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sglang_ascend.ops.chain.reference import StepInputs


class UnlikelyChains:
    """Of one step: whether its chains have become too unlikely to draft further.

    q(d_1) q(d_2) ... of the likeliest drafts is what the layer believes of the whole chain, and the
    chance that the next draft is even looked at. One more costs the same time whatever it is, so
    chains end where that falls below ``least``, on average over the batch. What an end is decided
    by was drafted and is verified, so it hides no draft: replies keep their distribution.
    """

    def __init__(
        self, least: float, agreed: Callable[[bool], bool] = lambda is_unlikely: is_unlikely
    ) -> None:
        self.least, self.agreed = least, agreed
        self._kept: torch.Tensor | float = 1.0

    def __call__(self, likelihood: torch.Tensor) -> bool:
        """``likelihood`` float [batch], q of the last draft, the likeliest. Waits for it."""
        self._kept = self._kept * likelihood
        return self.agreed(bool(self._kept.mean() < self.least))


def of_rows(inputs: StepInputs, width: int) -> StepInputs:
    """Of the first ``width`` rows of each request, where a step drafts more than it verifies."""
    batch_size = len(inputs.kv_lens)
    others = len(inputs.positions) // batch_size - width
    positions, row_slots = (
        rows.view(batch_size, -1)[:, :width].reshape(-1)
        for rows in (inputs.positions, inputs.row_slots)
    )
    return replace(
        inputs, positions=positions, row_slots=row_slots, kv_lens=inputs.kv_lens - others
    )


def lengthened(candidates: torch.Tensor, width: int) -> torch.Tensor:
    """int64 [batch, width]: the last one repeated; verification drops what is wrong of that."""
    missing = width - candidates.shape[1]
    if missing == 0:
        return candidates
    if candidates.shape[1] == 1:  # behind a step without drafts: in half the time
        return candidates.expand(-1, width).contiguous()
    return torch.cat([candidates, candidates[:, -1:].expand(-1, missing)], dim=1)
