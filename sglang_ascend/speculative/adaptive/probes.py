"""When another K than the one in force is run for a few steps, to learn what it is worth."""

from __future__ import annotations

import math
from collections.abc import Callable

from sglang_ascend.speculative.adaptive.beliefs import Beliefs
from sglang_ascend.speculative.adaptive.tuning import Tuning


class Probes:
    """A probe is run where what it may find is worth more than it costs.

    It costs its changes of K, and the time in which the K in force would emit more. It is worth,
    for each step for which the load may stay, ``value_of_knowing`` the K's gain over its best
    rival; a load is expected to stay as long as it has stayed.

    What was believed long ago may have changed. So the K that was not run for longest is probed
    too, paid out of a fixed share of all steps; of what is left a quarter of the price is kept.
    """

    def __init__(self, max_drafts: int, tuning: Tuning) -> None:
        self.tuning = tuning
        self.k, self.left = 0, 0
        self._credit, self._unasked, self._num_steps = 0.0, 0, 0
        self._last_run = [0] * (max_drafts + 1)

    def ran(self, k: int) -> int:
        """``k``, which the next step drafts."""
        self._num_steps += 1
        self._last_run[k] = self._num_steps
        return k

    def maybe_start(
        self,
        beliefs: Beliefs,
        in_force: int,
        steps: int,
        stay: int,
        catch_up: Callable[[], float],
    ) -> None:
        """``steps`` behind the last decision, before a step at a load that has stayed for
        ``stay``."""
        self._credit += steps * self.tuning.probe_share
        self._unasked += steps
        # Now and then, for it takes longer than all else that a step asks.
        if self._unasked < self.tuning.probe_steps:
            return
        self._unasked = 0
        others = [k for k in range(len(beliefs.values)) if k != in_force]
        prices = {k: self._price(beliefs, k, in_force) for k in others}
        horizon = min(max(stay, self.tuning.least_horizon), self.tuning.most_horizon)
        worth = {k: horizon * _worth(beliefs, k) for k in others}
        best = max(others, key=lambda k: worth[k] - prices[k])
        stalest = min(others, key=self._last_run.__getitem__)

        def with_catch_up(k: int) -> float:
            return prices[k] + (catch_up() / beliefs.seconds[in_force] if k else 0.0)

        # What is to be caught up is counted only where the rest is worth it.
        if worth[best] > prices[best]:
            if worth[best] > with_catch_up(best):
                self._start(best)
        elif self._credit > prices[stalest] and self._credit > (price := with_catch_up(stalest)):
            # Little is saved: two such probes close together cost a load more than the share.
            self._credit = min(self._credit - price, price / 4)
            self._start(stalest)

    def _price(self, beliefs: Beliefs, k: int, in_force: int) -> float:
        """In steps of the K in force."""
        longer = beliefs.seconds[k] / beliefs.seconds[in_force]
        # The first step is not timed, and takes as long.
        lost = (1 + self.tuning.probe_steps) * longer * max(0.0, -beliefs.gain(k, over=in_force))
        return self.tuning.probe_changes + lost

    def _start(self, k: int) -> None:
        self.k, self.left = k, self.tuning.probe_steps


def _worth(beliefs: Beliefs, k: int) -> float:
    values = beliefs.values
    rival = max((j for j in range(len(values)) if j != k), key=values.__getitem__)
    return value_of_knowing(math.log(values[k] / values[rival]), beliefs.doubt(k, rival))


def value_of_knowing(gain: float, deviation: float) -> float:
    """What it is worth, for a step, to know a gain g that is believed to be normal with this mean
    and deviation: E[max(0, g)] - max(0, E[g])."""
    if deviation == 0:
        return 0.0
    z = abs(gain) / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return deviation * (density - z * math.erfc(z / math.sqrt(2)) / 2)
