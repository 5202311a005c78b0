"""Says when acceptance is not what a draft of this model can have: next to none, or all of it.

Fed with host integers that the scheduler has anyway; a count in a sliding window decides.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

logger = logging.getLogger(__name__)

# Drafted steps of one request each that are judged together, and of how many requests at least:
# steps of one request resemble each other.
WINDOW = 1024
MIN_REQUESTS = 4
# A second warning of the same kind within this time is counted and not logged.
QUIET_S = 600.0

COLLAPSED = "collapsed"
PERFECT = "perfect"
KINDS: tuple[str, ...] = (COLLAPSED, PERFECT)

# Collapsed: draft 1 is accepted in fewer steps than this (an untrained MTP layer of nano-deepseek:
# 0.6 %, by chance). Perfect: a draft is rejected in fewer.
RARE = {COLLAPSED: 0.05, PERFECT: 0.02}
# Of calling an event rare (or no longer rare) that is exactly as frequent as RARE, per window.
RISK = 1e-4

_CAUSES = {
    COLLAPSED: (
        "the MTP layer predicts nothing of this model, so its weights were not loaded or are "
        "another model's: check --speculative-draft-model-path (sampling at a temperature that "
        "makes nearly every token equally likely looks the same)"
    ),
    PERFECT: (
        "either outputs loop or are constrained to one continuation, which is harmless, or the "
        "target's logits no longer depend on its input (damaged weights) or verification keeps "
        "every draft: read some outputs and compare them with a server without "
        "--speculative-algorithm"
    ),
}


def decisive_counts(num_steps: int, rate: float, risk: float) -> tuple[int, int]:
    """The counts of an event in ``num_steps`` that settle whether it is rarer than ``rate``.

    (largest count whose upper confidence bound is below ``rate``, or -1 if even 0 is not;
    smallest whose lower bound is above it). Clopper-Pearson bounds, one-sided, at 1 - ``risk``:
    the upper bound of k is below ``rate`` exactly if P(Binomial(num_steps, rate) <= k) < risk.
    """
    below, above, at_most = -1, num_steps + 1, 0.0
    for k in range(num_steps + 1):
        at_least = 1.0 - at_most
        if at_least < risk:
            above = k
            break
        log_ways = math.lgamma(num_steps + 1) - math.lgamma(k + 1) - math.lgamma(num_steps - k + 1)
        at_most += math.exp(log_ways + k * math.log(rate) + (num_steps - k) * math.log1p(-rate))
        if at_most < risk:
            below = k
    return below, above


class _Step(NamedTuple):
    """Counts of one batch step."""

    num_rows: int  # requests in the batch
    num_accepted: int  # drafts
    num_first_accepted: int  # rows whose draft 1 was accepted
    num_rejected: int  # rows of which some draft was not
    num_finished: int  # requests that ended before it and after the step before


class AcceptanceWatchdog:
    """Warns once when acceptance becomes impossible, and says when it recovers.

    The state changes only where a confidence bound lies on the other side of ``RARE``, so that
    acceptance near the boundary does not make it flap. If draft 1 is accepted in one of ten steps,
    and steps are independent, an alarm has a probability below 1e-15 in a window.

    ``on_change(kind, is_active)`` is told every change; of the log lines, one kind's come at most
    every ``QUIET_S`` seconds of ``clock``.
    """

    def __init__(
        self,
        num_drafts: int,
        on_change: Callable[[str, bool], None] = lambda kind, is_active: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_drafts = num_drafts
        self._on_change = on_change
        self._clock = clock
        self._bounds = {kind: decisive_counts(WINDOW, RARE[kind], RISK) for kind in KINDS}
        self._steps: deque[_Step] = deque()
        self._totals = _Step(0, 0, 0, 0, 0)
        self._num_finished = 0
        self._active = dict.fromkeys(KINDS, False)
        self._warned_at = dict.fromkeys(KINDS, -math.inf)
        self._is_announced = dict.fromkeys(KINDS, False)

    def is_active(self, kind: str) -> bool:
        return self._active[kind]

    def request_finished(self) -> None:
        self._num_finished += 1

    def record(self, accepted: Sequence[int], num_drafts: int | None = None) -> None:
        """One step of a batch: the drafts accepted of each request, 0 to K; ``num_drafts`` where
        the step had another K."""
        if len(accepted) == 0:
            return
        num_rows = len(accepted)
        step = _Step(
            num_rows,
            sum(accepted),
            num_rows - accepted.count(0),
            sum(n < (num_drafts or self.num_drafts) for n in accepted),
            self._num_finished,
        )
        self._num_finished = 0
        self._steps.append(step)
        self._totals = _Step(*map(int.__add__, self._totals, step))
        while self._totals.num_rows - self._steps[0].num_rows >= WINDOW:
            self._totals = _Step(*map(int.__sub__, self._totals, self._steps.popleft()))
        if self._totals.num_rows >= WINDOW:
            self._judge(COLLAPSED, self._totals.num_first_accepted)
            self._judge(PERFECT, self._totals.num_rejected)

    def _num_requests(self) -> int:
        """At least so many requests had steps in the window."""
        return max(self._steps[-1].num_rows, self._totals.num_finished + 1)

    def _judge(self, kind: str, num_events: int) -> None:
        """The window may be longer than WINDOW by part of a batch, which makes a small count only
        more telling; a large one is rare enough not to matter."""
        rare_up_to, frequent_from = self._bounds[kind]
        if self._active[kind]:
            if num_events >= frequent_from:
                self._recover(kind)
        elif num_events <= rare_up_to and self._num_requests() >= MIN_REQUESTS:
            self._alarm(kind)

    def _alarm(self, kind: str) -> None:
        self._active[kind] = True
        self._on_change(kind, True)
        now = self._clock()
        self._is_announced[kind] = now - self._warned_at[kind] >= QUIET_S
        if self._is_announced[kind]:
            self._warned_at[kind] = now
            logger.warning("%s: %s.", self._measured(), _CAUSES[kind])

    def _recover(self, kind: str) -> None:
        self._active[kind] = False
        self._on_change(kind, False)
        if self._is_announced[kind]:
            logger.info("%s: no longer %s.", self._measured(), kind)

    def _measured(self) -> str:
        length = 1 + self._totals.num_accepted / self._totals.num_rows
        return (
            f"acceptance length {length:.2f} (of 1 to {self.num_drafts + 1}) over "
            f"{self._totals.num_rows} drafted steps"
        )
