"""What drafting each number of tokens is worth at one load, as far as is known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_ascend.speculative.adaptive.costs.every_load import LoadCosts
from sglang_ascend.speculative.adaptive.estimates import AcceptanceByClass


@dataclass(frozen=True)
class LookedUp:
    """Chains of a batch that no model drafted, and that are verified whatever K is."""

    share: float  # of its requests
    kept: float  # drafts of each that are expected to be kept
    num_drafts: int


class Beliefs:
    """V(K) = E(K) / cost(K) of K in 0..max_drafts, which is S(B,K) up to a factor."""

    def __init__(
        self,
        acceptance: AcceptanceByClass,
        share_sampled: float,
        load: LoadCosts,
        looked_up: LookedUp | None,
    ) -> None:
        self.load, self._acceptance, self._share_sampled = load, acceptance, share_sampled
        expected = acceptance.expected_tokens(share_sampled)
        self.seconds = [load.seconds((k, k)) for k in range(len(expected))]
        self.values = [tokens / cost for tokens, cost in zip(expected, self.seconds, strict=True)]
        if looked_up is not None:
            beside = [self._beside(looked_up, k, tokens) for k, tokens in enumerate(expected)]
            self.values = list(map(max, self.values, beside))

    @property
    def best(self) -> int:
        return max(range(len(self.values)), key=self.values.__getitem__)

    def gain(self, k: int, over: int) -> float:
        """V(k) / V(over) - 1."""
        return self.values[k] / self.values[over] - 1

    def doubt(self, k: int, other: int) -> float:
        """Deviation of log V(k) / V(other)."""
        of_tokens = self._acceptance.doubt(self._share_sampled, k, other)
        return math.hypot(of_tokens, self.load.deviation((k, k), (other, other)))

    def _beside(self, found: LookedUp, num_drafts: int, tokens: float) -> float:
        """V(K) where lookups are verified beside this K's chains of E(K) ``tokens``."""
        # Where all are looked up the MTP layer does not run.
        drafted = num_drafts if found.share < 1 else 0
        verified = max(found.num_drafts, num_drafts)
        emitted = tokens + found.share * max(0.0, 1 + found.kept - tokens)
        return emitted / self.load.hopeful_seconds((drafted, verified))
