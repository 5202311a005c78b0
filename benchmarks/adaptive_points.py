"""How a server's own choice of K compares with what had turns beside it, at one load."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.adaptive_cycles import Array, Cycles, Step
from benchmarks.turn_state import ADAPTIVE, PLAIN

DRAWS = 2000


def mean_contexts(steps: Sequence[Step]) -> dict[str, float]:
    """Tokens of a request in the steps of each policy."""
    contexts: dict[str, list[int]] = defaultdict(list)
    for step in steps:
        contexts[step["name"]].append(step["context"])
    return {name: statistics.mean(of_name) for name, of_name in contexts.items()}


def mean_speedups(beliefs: Sequence[Sequence[float]]) -> list[float] | None:
    """Geometric means of what was believed of each K, at the starts of turns."""
    if not beliefs:
        return None
    return [statistics.geometric_mean(of_k) for of_k in zip(*beliefs, strict=True)]


@dataclass(frozen=True)
class Point:
    """One load."""

    context: int
    batch: int
    cycles: Cycles
    predicted: list[float] | None  # S(B,0), S(B,1), ... as the server held them
    contexts: Mapping[str, float]

    @property
    def others(self) -> list[str]:
        return [name for name in self.cycles.names if name != ADAPTIVE]

    @property
    def fixed(self) -> list[str]:
        """K = 0, 1, ..."""
        return [name for name in self.others if name != PLAIN]

    @property
    def own_steps(self) -> list[int]:
        """Those of its own choice that verified 0, 1, ... drafts."""
        count = Counter[int]()
        for (name, chain, _), steps in zip(
            self.cycles.kinds, self.cycles.steps.sum(0), strict=True
        ):
            count[chain] += int(steps) * (name == ADAPTIVE)
        return [count[chain] for chain in range(self.cycles.kept.shape[-1])]

    @cached_property
    def rates(self) -> dict[str, float]:
        (rates,) = self.cycles.rates(np.ones((1, len(self.cycles))))
        by_name = dict(zip(self.cycles.names, map(float, rates), strict=True))
        return {name: by_name[name] for name in [PLAIN, *self.fixed, ADAPTIVE]}

    def over(self, other: str) -> dict[str, float]:
        """The server's own choice over ``other``."""
        return self._over([other] * len(self.cycles))

    def over_best(self) -> dict[str, float]:
        """Over the fastest of the others, which is chosen for each cycle by the other cycles: by
        all of them it would be the luckiest one."""
        places = [self.cycles.names.index(name) for name in self.others]
        but_one = 1 - np.eye(len(self.cycles))
        best = self.cycles.rates(but_one)[:, places].argmax(1)
        return self._over([self.others[i] for i in best])

    def _over(self, others: Sequence[str]) -> dict[str, float]:
        """A ratio of rates to those of the policy named for each cycle, and the 95 % bootstrap
        interval by cycles: the geometric mean, where more than one is named."""
        count = len(self.cycles)
        drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), DRAWS)
        weights = np.concatenate((np.ones((1, count)), drawn), dtype=np.float64)
        logarithm = np.zeros(len(weights))
        for name in set(others):
            is_named = np.array([other == name for other in others])
            logarithm += self._log_ratios(weights * is_named, name) * (weights @ is_named) / count
        ratio, *ratios = np.exp(logarithm)
        low, high = np.quantile(ratios, (0.025, 0.975))
        return {"ratio": float(ratio), "low": float(low), "high": float(high)}

    def _log_ratios(self, weights: Array, name: str) -> Array:
        """``[draws]``, 0 where no cycle is drawn."""
        is_drawn = weights.any(1)
        rates = self.cycles.rates(weights[is_drawn])
        own, other = (rates[:, self.cycles.names.index(n)] for n in (ADAPTIVE, name))
        ratios = np.zeros(len(weights))
        ratios[is_drawn] = np.log(own / other)
        return ratios

    def to_json(self) -> dict[str, Any]:
        measured = [self.rates[name] / self.rates[self.fixed[0]] for name in self.fixed]
        predicted = self.predicted and self.predicted[: len(measured)]
        alike = self.cycles.own_over_fixed()
        return {
            "context": self.context,
            "batch": self.batch,
            "cycles": len(self.cycles),
            "mean_context": self.contexts,
            "tok_s": self.rates,
            "own_steps": self.own_steps,
            "own_over_fixed": alike and alike._asdict(),
            "best": max(self.others, key=self.rates.__getitem__),
            "over_best": self.over_best(),
            "over_plain": self.over(PLAIN),
            "speedups": measured,
            "predicted": self.predicted,
            "prediction_errors": predicted and prediction_errors(predicted, measured),
        }


def prediction_errors(
    predicted: Sequence[float], measured: Sequence[float]
) -> dict[str, float] | None:
    """By what share of it a speed-up is off: that of the K that is believed to be best, and the
    largest of all. None of K = 0 alone, whose is 1 by definition."""
    if len(measured) == 1:
        return None
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    return {"best": errors[int(np.argmax(predicted))], "largest": max(errors)}
