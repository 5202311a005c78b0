"""What drafting K tokens is worth.

S(B,K) = E(K) T(B,1) / (T(B,K+1) + K T_draft(B) + T_overhead).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul


def expected_by_drafts(acceptance: Sequence[float]) -> list[float]:
    """E(0), E(1), ..., of as many drafts as ``acceptance`` has positions.

    E(K) = 1 + sum over k <= K of the product over j <= k of a_j, and ``acceptance[j - 1]`` is a_j,
    the share of drafts j that are kept where all before it were.
    """
    return list(accumulate(accumulate(acceptance, mul, initial=1.0)))


def expected_tokens(acceptance: Sequence[float], num_drafts: int) -> float:
    """E(num_drafts). A shorter ``acceptance`` goes on with its last value."""
    last = len(acceptance) - 1
    return expected_by_drafts([acceptance[min(j, last)] for j in range(num_drafts)])[-1]


@dataclass(frozen=True)
class StepCosts:
    """What forwards cost at one batch size, in any unit."""

    target: Sequence[float]  # T(B,1), T(B,2), ...: the target over 1, 2, ... rows of each request
    draft: float  # T_draft(B): the MTP layer once
    overhead: float = 0.0  # T_overhead: what a step with drafts costs besides the models

    def of_step(self, num_drafts: int) -> float:
        """Without drafts a step is plain decode, and has no overhead."""
        if num_drafts == 0:
            return self.target[0]
        return self.target[num_drafts] + num_drafts * self.draft + self.overhead


def speedups(acceptance: Sequence[float], costs: StepCosts, max_drafts: int) -> list[float]:
    """S(B,0), ..., S(B,max_drafts) at the batch size of ``costs``; S(B,0) is 1."""
    return [
        expected_tokens(acceptance, k) * costs.target[0] / costs.of_step(k)
        for k in range(max_drafts + 1)
    ]
