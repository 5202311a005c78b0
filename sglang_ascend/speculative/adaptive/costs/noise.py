"""By how much the times of steps vary on this machine, learnt from steps near to each other."""

from __future__ import annotations

from typing import Any

# Deviations of logarithms: at first, at least and at most; a larger difference counts as the most.
NOISE, LEAST_NOISE, MOST_NOISE = 0.1, 0.01, 0.5
DRIFT, LEAST_DRIFT = 0.05, 0.005
# The share of each step in what is known.
SHARE = 0.01


class StepNoise:
    """The log time of a step has noise r of its own, and all costs drift by q from step to step
    (variances), for what else the machine does goes on for some steps.

    The squared difference of two steps of a kind is q + 2r on average where one is behind the
    other, and 2q + 2r where there is one between them.
    """

    def __init__(self) -> None:
        self._apart = [DRIFT**2 * steps + 2 * NOISE**2 for steps in (1, 2)]
        self._kind: Any = None
        self._before: list[float] = []  # log times of the last steps of this kind, newest first

    @property
    def own(self) -> float:
        """r"""
        once, twice = self._apart
        return min(max(once - twice / 2, LEAST_NOISE**2), MOST_NOISE**2)

    @property
    def drift(self) -> float:
        """q"""
        once, twice = self._apart
        return max(twice - once, LEAST_DRIFT**2)

    def record(self, kind: Any, log_seconds: float) -> None:
        """A step of what is told apart as ``kind``, load included."""
        if kind != self._kind:
            self._kind, self._before = kind, []
        for i, before in enumerate(self._before):
            difference = min(abs(log_seconds - before), MOST_NOISE)
            self._apart[i] += SHARE * (difference**2 - self._apart[i])
        self._before = [log_seconds, *self._before[:1]]
