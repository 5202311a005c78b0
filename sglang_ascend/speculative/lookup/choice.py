"""Which chains of a step are looked up, and how long those are: most tokens for a step's time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# What one more row costs the target's forward, of what the forward of a few rows costs, where
# nothing is measured.
ROW_COST = 0.05

# Cost of a step, in any unit, that verifies V drafts of each request and for which the MTP layer
# drafts D.
Cost = Callable[[int, int], float]


@dataclass(frozen=True)
class Choice:
    """The chains that are looked up are as long as the longest: its rows are verified anyway."""

    is_chosen: torch.Tensor  # bool [batch]
    num_drafts: int  # of those that are chosen; 0: none is
    kept: float  # drafts of them that are expected to be kept, of one on average


def none_chosen(batch_size: int) -> Choice:
    """Chains of the MTP layer alone."""
    return Choice(torch.zeros(batch_size, dtype=torch.bool), 0, 0.0)


def widths(num_mtp_drafts: int, most_drafts: int) -> list[int]:
    """Lengths that a lookup may have: few, so that each is soon measured."""
    least = max(1, num_mtp_drafts)
    lengths, longer = [least], 2
    while longer < most_drafts:
        if longer > least:
            lengths.append(longer)
        longer *= 2
    return [*lengths, most_drafts] if most_drafts > least else lengths


def choose_chains(
    kept: torch.Tensor, kept_of_mtp: torch.Tensor, num_mtp_drafts: int, cost: Cost
) -> Choice:
    """What emits most in its time, chains of the MTP layer alone among it.

    ``kept`` float [batch, drafts] is what 1, 2, ... drafts of a lookup are expected to keep, 0
    where nothing was found; ``kept_of_mtp`` float [batch] those that the MTP layer drafts.
    """
    batch_size, most_drafts = kept.shape
    of_mtp = kept_of_mtp[:, None]
    is_better = (kept > 0) & (kept >= of_mtp)
    emitted = (batch_size + torch.where(is_better, kept, of_mtp).sum(dim=0)).tolist()
    chosen = is_better.sum(dim=0).tolist()
    best = 0
    most = (batch_size + float(kept_of_mtp.sum())) / cost(num_mtp_drafts, num_mtp_drafts)
    for width in widths(num_mtp_drafts, most_drafts):
        # Where all are looked up the MTP layer does not run.
        drafted = num_mtp_drafts if chosen[width - 1] < batch_size else 0
        value = emitted[width - 1] / cost(width, drafted)
        if chosen[width - 1] and value >= most:
            best, most = width, value
    if best == 0:
        return none_chosen(batch_size)
    is_chosen = is_better[:, best - 1]
    return Choice(is_chosen, best, float(kept[is_chosen, best - 1].mean()))


def prior_cost(batch_size: int) -> Cost:
    return lambda verified, drafted: 1 + ROW_COST * batch_size * (verified + 1)
