"""Chooses how many tokens the next step drafts, 0 included, and changes its mind seldom."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_ascend.speculative.adaptive.beliefs import Beliefs, LookedUp
from sglang_ascend.speculative.adaptive.costs.every_load import Costs, LoadCosts
from sglang_ascend.speculative.adaptive.estimates import AcceptanceByClass
from sglang_ascend.speculative.adaptive.probes import Probes
from sglang_ascend.speculative.adaptive.tuning import Tuning


class AdaptiveDrafts:
    """K in 0..max_drafts by value V(K) = E(K) / cost(K), which is S(B,K) up to a factor.

    Hysteresis: what another K would have gained beyond a margin is summed up step by step, never
    below 0, and K changes when the sum exceeds what a change costs. So K follows a batch that
    grows, ignores one that oscillates across a threshold, and loses at most that cost before.

    ``Probes`` run another K now and then, so that its cost and its acceptance are known. Both
    together change K so often at most, however loads come and go.

    At one load decisions lie some steps apart, and what the steps between took is read then: to
    read one and to decide takes 0.2 ms where a forward has used the processor's caches in between.
    """

    def __init__(
        self, max_drafts: int, tuning: Tuning | None = None, costs: Costs | None = None
    ) -> None:
        self.max_drafts, self.tuning = max_drafts, tuning or Tuning()
        self.acceptance, self.costs = AcceptanceByClass(max_drafts), costs or Costs()
        self.probes = Probes(max_drafts, self.tuning)
        self.share_sampled = 0.0  # of the batch's requests; the others are greedy
        self.looked_up: LookedUp | None = None
        self.in_force = max_drafts
        self._lost = [0.0] * (max_drafts + 1)
        self._changes = self.tuning.most_changes  # of K, that are allowed now
        self._load: LoadCosts | None = None
        self._stay = 0  # steps since the load changed
        self._undecided = 0  # steps since the last decision
        self._unread: list[tuple[int, float, int, float, int | None]] = []

    def choose(
        self, batch_size: int, context: float, catch_up: Callable[[], float] = lambda: 0.0
    ) -> int:
        """K of the next chain of a batch with so many cached tokens a request.

        ``catch_up`` says in how many seconds the MTP layer could see what it has skipped.
        """
        if self.probes.left > 0:
            self.probes.left -= 1
            return self.probes.ran(self.probes.k)
        self._undecided += 1
        load = self.costs.of(batch_size, context)
        if load is self._load and self._undecided < self.tuning.decision_steps:
            return self.probes.ran(self.in_force)
        steps, self._undecided = self._undecided, 0
        beliefs = self._beliefs(batch_size, context)
        self._stay = self._stay + steps if load is self._load else 0
        self._load = load
        allowed = self._changes + steps * self.tuning.changes_a_step
        self._changes = min(allowed, self.tuning.most_changes)
        self._add_up(beliefs, steps)
        best = max(range(len(self._lost)), key=self._lost.__getitem__)
        worth = self._lost[best] - self.tuning.switch_cost
        if (
            worth >= 0
            and self._changes >= 1
            and (best == 0 or worth >= catch_up() / beliefs.seconds[self.in_force])
        ):
            self._switch(best)
        elif self._changes >= 2:
            self.probes.maybe_start(beliefs, self.in_force, steps, self._stay, catch_up)
            self._changes -= 2 * (self.probes.left > 0)
        return self.probes.ran(self.probes.k if self.probes.left > 0 else self.in_force)

    def start_anew(self, batch_size: int, context: float) -> None:
        """Most requests of the batch are new: the best K is taken at once."""
        beliefs = self._beliefs(batch_size, context)
        if beliefs.gain(beliefs.best, over=self.in_force) > self.tuning.margin:
            self.in_force, self.probes.left = beliefs.best, 0
        self._lost = [0.0] * len(self._lost)

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
        self._unread.append((batch_size, context, num_drafts, seconds, verified))

    def record_acceptance(
        self, accepted: Sequence[int], num_drafts: int, is_sampled: Sequence[bool]
    ) -> None:
        """One step: the drafts kept of each request."""
        self.acceptance.record(accepted, num_drafts, is_sampled)

    def speedups(self, batch_size: int, context: float) -> list[float]:
        """S(B,0), S(B,1), ..., as far as is known: S(B,0) is 1."""
        beliefs = self._beliefs(batch_size, context)
        return [1 + beliefs.gain(k, over=0) for k in range(self.max_drafts + 1)]

    def _beliefs(self, batch_size: int, context: float) -> Beliefs:
        for step in self._unread:
            self.costs.record(*step)
        self._unread.clear()
        load = self.costs.of(batch_size, context)
        return Beliefs(self.acceptance, self.share_sampled, load, self.looked_up)

    def _add_up(self, beliefs: Beliefs, steps: int) -> None:
        for k in range(self.max_drafts + 1):
            if k != self.in_force:
                gain = beliefs.gain(k, over=self.in_force) - self.tuning.margin
                self._lost[k] = max(0.0, self._lost[k] + steps * min(gain, 1.0))

    def _switch(self, num_drafts: int) -> None:
        self.in_force = num_drafts
        self._lost = [0.0] * len(self._lost)
        self._changes -= 1
