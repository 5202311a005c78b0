"""Chooses how many tokens the next step drafts, 0 included, and changes its mind seldom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_ascend.speculative.adaptive.estimates import AcceptanceByClass, Costs


@dataclass(frozen=True)
class Tuning:
    """Costs are in steps: what a step of the current K takes."""

    margin: float = 0.015  # a gain below this never changes K
    switch_cost: float = 2.0  # steps that must have been lost to the better K before it is taken
    min_steps: int = 16  # between two changes of K, but for the end of a probe
    probe_steps: int = 6  # of another K, the first of which is not timed
    probe_share: float = 0.005  # of all steps, that probes may cost
    probe_changes: float = 0.5  # steps that the two changes of K around a probe cost


@dataclass(frozen=True)
class LookedUp:
    """Chains of a batch that no model drafted, and that are verified whatever K is."""

    share: float  # of its requests
    kept: float  # drafts of each that are expected to be kept
    num_drafts: int


class AdaptiveDrafts:
    """K in 0..max_drafts by value V(K) = E(K) / cost(K), which is S(B,K) up to a factor.

    Hysteresis: what another K would have gained beyond a margin is summed up step by step, never
    below 0, and K changes when the sum exceeds what a change costs. So K follows a batch that
    grows, ignores one that oscillates across a threshold, and loses at most that cost before.

    Probes: a K that is not in force is run for a few steps now and then, so that its cost and the
    acceptance are known; they are paid out of a fixed share of all steps.
    """

    def __init__(self, max_drafts: int, tuning: Tuning | None = None) -> None:
        self.max_drafts, self.tuning = max_drafts, tuning or Tuning()
        self.acceptance, self.costs = AcceptanceByClass(max_drafts), Costs()
        self.share_sampled = 0.0  # of the batch's requests; the others are greedy
        self.looked_up: LookedUp | None = None
        self.in_force = max_drafts
        self._lost = [0.0] * (max_drafts + 1)
        self._since_switch = self.tuning.min_steps
        self._credit = 0.0
        self._probe, self._probe_left = 0, 0
        self._last_run = [0] * (max_drafts + 1)
        self._num_steps = 0

    def choose(
        self, batch_size: int, context: float, catch_up: Callable[[], float] = lambda: 0.0
    ) -> int:
        """K of the next chain of a batch with so many cached tokens a request.

        ``catch_up`` says in how many seconds the MTP layer could see what it has skipped.
        """
        self._num_steps += 1
        if self._probe_left > 0:
            self._probe_left -= 1
            return self._ran(self._probe)
        gains = self._gains(batch_size, context)
        self._since_switch += 1
        self._add_up(gains)
        best = max(range(len(gains)), key=self._lost.__getitem__)
        step = self.costs.seconds(batch_size, context, self.in_force)
        worth = self._lost[best] - self.tuning.switch_cost
        if (
            worth >= 0
            and self._since_switch >= self.tuning.min_steps
            and (best == 0 or worth >= catch_up() / step)
        ):
            self._switch(best)
        else:
            self._maybe_probe(gains, batch_size, context, catch_up)
        return self._ran(self._probe if self._probe_left > 0 else self.in_force)

    def start_anew(self, batch_size: int, context: float) -> None:
        """Most requests of the batch are new: the best K is taken at once."""
        gains = self._gains(batch_size, context)
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] > self.tuning.margin:
            self.in_force, self._probe_left = best, 0
        self._lost = [0.0] * len(self._lost)

    def drafts_behind_prompts(self) -> bool:
        """Whether a draft of the first chain of a new request is wanted."""
        return self.in_force > 0

    def record_time(
        self,
        batch_size: int,
        context: float,
        num_drafts: int,
        seconds: float,
        verified: int | None = None,
    ) -> None:
        """One step that drafted ``num_drafts`` and verified as many, or more where some were looked
        up, from its start to the next one's."""
        self.costs.record(batch_size, context, num_drafts, seconds, verified)

    def record_acceptance(
        self, accepted: Sequence[int], num_drafts: int, is_sampled: Sequence[bool]
    ) -> None:
        """One step: the drafts kept of each request."""
        self.acceptance.record(accepted, num_drafts, is_sampled)

    def speedups(self, batch_size: int, context: float) -> list[float]:
        """S(B,0), S(B,1), ..., as far as is known: S(B,0) is 1."""
        gains = self._gains(batch_size, context)
        return [(1 + gain) / (1 + gains[0]) for gain in gains]

    def _gains(self, batch_size: int, context: float) -> list[float]:
        """V(K) / V(K in force) - 1 of every K."""
        values = [
            self._value(batch_size, context, k, tokens)
            for k, tokens in enumerate(self.acceptance.expected_tokens(self.share_sampled))
        ]
        return [value / values[self.in_force] - 1 for value in values]

    def _value(self, batch_size: int, context: float, num_drafts: int, tokens: float) -> float:
        """V(K) of E(K) ``tokens``; with lookups where they are worth more beside this K."""
        value = tokens / self.costs.seconds(batch_size, context, num_drafts)
        found = self.looked_up
        if found is None:
            return value
        # Where all are looked up the MTP layer does not run.
        drafted = num_drafts if found.share < 1 else 0
        verified = max(found.num_drafts, num_drafts)
        emitted = tokens + found.share * max(0.0, 1 + found.kept - tokens)
        beside = emitted / self.costs.seconds(batch_size, context, drafted, verified)
        return max(value, beside)

    def _add_up(self, gains: Sequence[float]) -> None:
        for k, gain in enumerate(gains):
            if k != self.in_force:
                self._lost[k] = max(0.0, self._lost[k] + min(gain - self.tuning.margin, 1.0))

    def _switch(self, num_drafts: int) -> None:
        self.in_force = num_drafts
        self._lost = [0.0] * len(self._lost)
        self._since_switch = 0

    def _maybe_probe(
        self,
        gains: Sequence[float],
        batch_size: int,
        context: float,
        catch_up: Callable[[], float],
    ) -> None:
        self._credit += self.tuning.probe_share
        known = [self.costs.is_known(batch_size, context, k) for k in range(len(gains))]
        if not known[self.in_force] or (all(known) and self._credit < self.tuning.probe_changes):
            return
        others = [k for k in range(len(gains)) if k != self.in_force]
        stalest = min(others, key=lambda k: (known[k], self._last_run[k]))
        step = self.costs.seconds(batch_size, context, self.in_force)
        price = 0.0 if stalest == 0 else catch_up() / step
        if known[stalest]:
            # Besides the changes, the time in which the K in force would emit more.
            longer = self.costs.seconds(batch_size, context, stalest) / step
            price += self.tuning.probe_changes
            price += self.tuning.probe_steps * longer * max(0.0, -gains[stalest])
        # What is not known at all must be tried once, whatever it costs.
        if self._credit >= price:
            self._credit -= price
            self._probe, self._probe_left = stalest, self.tuning.probe_steps

    def _ran(self, num_drafts: int) -> int:
        self._last_run[num_drafts] = self._num_steps
        return num_drafts
