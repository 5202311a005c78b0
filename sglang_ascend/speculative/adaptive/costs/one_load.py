"""What the kinds of steps of one load cost: a Kalman filter of their times."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

# All are of logarithms, and standard deviations. What the guesses of a load are off by together.
LEVEL = 2.0
# What costs change by from step to step, each by itself. Of a jump that is in doubt, a share.
ALONE, ALONE_IN_JUMP = 0.0005, 0.3
# Deviations below its estimate that a cost may well be. Of a kind that takes n > 1 times as long as
# the one that was timed most, so much is counted behind (n - 1) times so many steps of the load:
# what is learnt is of use for as long as the load stays, which is expected to be as long again.
HOPE, STEPS_OF_HOPE = 1.0, 400

Kind = tuple[int, int]  # of a step: drafts of the MTP layer, drafts that are verified
# (log seconds of a kind of step at a load, its deviation beside the load's other kinds)
Guess = Callable[["LoadCosts", Kind], tuple[float, float]]


class LoadCosts:
    """Log seconds of each kind of step of one load, a Kalman filter's estimate.

    A step's log time is its kind's cost x_i and noise. From step to step all x drift together, by
    much, and each by itself, by little. So a step of one kind moves the estimates of all, and what
    is learnt of their ratios is learnt from steps near to each other, whatever the machine does.
    """

    def __init__(self, batch_size: int, context: float, step: int, guess: Guess) -> None:
        self.batch_size, self.context, self.last_step = batch_size, context, step
        self._guess = guess
        self.kinds: dict[Kind, int] = {}
        self.num_steps: list[int] = []  # that were timed, of each kind
        self.first: dict[Kind, float] = {}  # seconds of a kind's first step, until its second
        self.fastest: dict[Kind, float] = {}  # least log seconds that were ever believed, of timed
        self.restored = set[Kind]()  # of those what was kept is believed, none was timed since
        self.suspects = set[Kind]()  # whose last run began with a jump
        self.mean = np.zeros(0)
        # The covariance of ``mean`` is _known + _together + _alone I: a drift is of two numbers.
        self._known, self._together, self._alone = np.zeros((0, 0)), LEVEL**2, 0.0

    def log_seconds(self, kind: Kind) -> float:
        i = self.number(kind)
        return self.mean[i]

    def seconds(self, kind: Kind) -> float:
        return math.exp(self.log_seconds(kind))

    def hopeful_seconds(self, kind: Kind) -> float:
        """As little as it may well be, so that a kind of step that may be good is tried: at once
        where that costs little, and where it is dear once the load has stayed."""
        i, usual = self.number(kind), self.best_known
        longer = math.exp(self.mean[i] - self.mean[self.kinds[usual]]) - 1
        stayed = sum(self.num_steps) / (STEPS_OF_HOPE * longer) if longer > 0 else 1.0
        return math.exp(self.mean[i] - HOPE * min(1.0, stayed) * self.deviation(kind, usual))

    def deviation(self, kind: Kind, other: Kind) -> float:
        """Of the logarithm of the ratio of two costs."""
        i, j = self.number(kind), self.number(other)
        if i == j:
            return 0.0
        of = self._known
        return math.sqrt(max(0.0, of[i, i] + of[j, j] - 2 * of[i, j] + 2 * self._alone))

    def variance(self, i: int) -> float:
        """Of the logarithm of the cost of kind number ``i``."""
        return self._known[i, i] + self._together + self._alone

    def measured(self) -> dict[Kind, int]:
        """The numbers of the kinds that were timed."""
        return {kind: i for kind, i in self.kinds.items() if self.num_steps[i]}

    @property
    def best_known(self) -> Kind:
        """The kind that was timed most."""
        return max(self.kinds, key=lambda kind: self.num_steps[self.kinds[kind]])

    def number(self, kind: Kind) -> int:
        if kind not in self.kinds:
            self._add(kind, *self._guess(self, kind))
        return self.kinds[kind]

    def _add(self, kind: Kind, guess: float, deviation: float) -> None:
        """It stands beside the kinds that were timed as its guess stands beside theirs of now."""
        measured, n = self.measured(), len(self.kinds)
        timed = list(measured.values())
        above, known, grown = 0.0, self._known + self._alone * np.eye(n), np.zeros((n + 1, n + 1))
        grown[:n, :n] = known
        if timed:
            guesses = [self._guess(self, other)[0] for other in measured]
            above = float((self.mean[timed] - guesses).mean())
            grown[n, :n] = grown[:n, n] = known[timed].mean(axis=0)
            grown[n, n] = known[np.ix_(timed, timed)].mean()
        grown[n, n] += deviation**2
        self._alone = 0.0
        self._append(kind, guess + above, grown, 0)

    def _append(self, kind: Kind, mean: float, known: np.ndarray, num_steps: int) -> None:
        """``known`` is of all kinds, this one last."""
        self.kinds[kind] = len(self.kinds)
        self.mean, self._known = np.append(self.mean, mean), known
        self.num_steps.append(num_steps)

    def restore(self, kind: Kind, seconds: float, deviation: float, num_steps: int) -> None:
        """``num_steps`` of ``kind`` were timed before this server began. ``deviation`` is of the
        logarithm, beside the other kinds that are restored."""
        n = len(self.kinds)
        known = np.zeros((n + 1, n + 1))
        known[:n, :n], known[n, n] = self._known, deviation**2
        self._append(kind, math.log(seconds), known, num_steps)
        self.fastest[kind] = math.log(seconds)
        self.restored.add(kind)

    def guess_anew(self) -> None:
        """What was not timed, when it is asked for, by what is known now."""
        kept = list(self.measured())
        numbers = [self.kinds[kind] for kind in kept]
        self._known, self.mean = self._known[np.ix_(numbers, numbers)], self.mean[numbers]
        self.num_steps = [self.num_steps[i] for i in numbers]
        self.kinds = {kind: i for i, kind in enumerate(kept)}

    def drift(self, step: int, together: float) -> None:
        """To ``step``, which are counted over all loads; from each to the next all costs change by
        ``together``, a variance."""
        passed, self.last_step = step - self.last_step, step
        self._together += min(together * passed, LEVEL**2)
        self._alone += ALONE**2 * passed

    def jump(self, doubtful: float) -> None:
        """The machine has become slower or faster, and each cost by itself by a share of
        ``doubtful``, a logarithm."""
        self._together += LEVEL**2
        self._alone += (ALONE_IN_JUMP * doubtful) ** 2

    def observe(self, kind: Kind, innovation: float, noise: float) -> None:
        """A step took so much more than its cost; ``noise`` is a variance."""
        i = self.number(kind)
        row = self._known[i] + self._together
        row[i] += self._alone
        gain = row / (row[i] + noise)
        self.mean = self.mean + gain * innovation
        self._known = self._known - gain[:, None] * row
        self.num_steps[i] += 1
        self.fastest[kind] = min(self.fastest.get(kind, math.inf), self.mean[i])
