"""How often each draft is kept, as a server learns it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_ascend.speculative.adaptive.value import expected_by_drafts

# Of a_1 before anything was drafted, and the drafts that it counts for. a_j+1 starts from a_j.
PRIOR_ACCEPTANCE, PRIOR_DRAFTS = 0.7, 8.0
# Judged drafts, and steps, after both of which an older one counts half: replies differ, and change
# as they go on.
HALF_LIFE_DRAFTS, HALF_LIFE_STEPS = 500.0, 100.0


class Acceptance:
    """a_1, ..., a_K: kept drafts of those whose predecessors were kept, old ones fading."""

    def __init__(self, max_drafts: int) -> None:
        self._kept, self._judged = [0.0] * max_drafts, [0.0] * max_drafts

    def record(self, accepted: Sequence[int], num_drafts: int) -> None:
        """One step: the drafts kept of each request, of ``num_drafts``."""
        for j in range(num_drafts):
            judged = sum(n >= j for n in accepted)
            faded = 0.5 ** min(judged / HALF_LIFE_DRAFTS, 1 / HALF_LIFE_STEPS)
            self._judged[j] = faded * self._judged[j] + judged
            self._kept[j] = faded * self._kept[j] + sum(n > j for n in accepted)

    def rates(self) -> list[float]:
        rates, before = [], PRIOR_ACCEPTANCE
        for kept, judged in zip(self._kept, self._judged, strict=True):
            before = (kept + PRIOR_DRAFTS * before) / (judged + PRIOR_DRAFTS)
            rates.append(before)
        return rates

    def expected_tokens(self) -> list[float]:
        """E(0), E(1), ..."""
        return expected_by_drafts(self.rates())

    def doubt(self, num_drafts: int, other: int) -> float:
        """Deviation of the logarithm of E(num_drafts) / E(other): of rates of few drafts."""
        rates = self.rates()
        expected = expected_by_drafts(rates)
        fewer, more = sorted((num_drafts, other))
        variance = 0.0
        for j in range(fewer, more):
            # a_j dE/da_j: the tokens that are emitted behind a kept draft j.
            behind = expected[more] - expected[j]
            judged = self._judged[j] + PRIOR_DRAFTS
            variance += behind**2 * (1 - rates[j]) / (rates[j] * judged)
        return math.sqrt(variance) / expected[more]


class AcceptanceByClass:
    """``Acceptance`` of each class of requests: of greedy and of sampled ones.

    What a batch accepts changes at once when its requests do, and a class that has left the batch
    comes back with the acceptance that it had.
    """

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._of: dict[bool, Acceptance] = {}

    def of(self, is_sampled: bool) -> Acceptance:
        return self._of.setdefault(is_sampled, Acceptance(self._max_drafts))

    def record(self, accepted: Sequence[int], num_drafts: int, is_sampled: Sequence[bool]) -> None:
        """One step: the drafts kept of each request, of ``num_drafts``."""
        for wanted in set(is_sampled):
            mine = [n for n, given in zip(accepted, is_sampled, strict=True) if given == wanted]
            self.of(wanted).record(mine, num_drafts)

    def expected_tokens(self, share_sampled: float) -> list[float]:
        """E(0), E(1), ... of a batch of which a share is sampled."""
        greedy, sampled = (self.of(given).expected_tokens() for given in (False, True))
        return [
            (1 - share_sampled) * of_greedy + share_sampled * of_sampled
            for of_greedy, of_sampled in zip(greedy, sampled, strict=True)
        ]

    def doubt(self, share_sampled: float, num_drafts: int, other: int) -> float:
        """``Acceptance.doubt`` of the class that most requests are of."""
        return self.of(share_sampled > 0.5).doubt(num_drafts, other)
