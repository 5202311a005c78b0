"""What each policy of drafts emitted in its turns at one load, and how the own choice compares."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.turn_state import ADAPTIVE, PLAIN

# A step that takes so many times what others of its kind do met a pause of the machine.
PAUSE = 3.0
DRAWS = 2000


@dataclass(frozen=True)
class Emitted:
    """Tokens, and the seconds that they took."""

    tokens: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Emitted) -> Emitted:
        return Emitted(self.tokens + other.tokens, self.seconds + other.seconds)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


Cycle = dict[str, Emitted]  # of each policy's turn


def total(cycles: Iterable[Cycle], name: str) -> Emitted:
    return sum((cycle[name] for cycle in cycles), Emitted())


def cycles_of(steps: Sequence[Mapping[str, Any]]) -> list[Cycle]:
    """Those in which every policy had a turn. A pause counts as ``PAUSE`` steps."""
    kinds: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    for step in steps:
        kinds[step["name"], step.get("drafts")].append(step["seconds"])
    most = {kind: PAUSE * statistics.median(seconds) for kind, seconds in kinds.items()}
    cycles: dict[int, Cycle] = defaultdict(dict)
    for step in steps:
        seconds = min(step["seconds"], most[step["name"], step.get("drafts")])
        cycle, name = cycles[step["cycle"]], step["name"]
        cycle[name] = cycle.get(name, Emitted()) + Emitted(step["tokens"], seconds)
    names = {step["name"] for step in steps}
    return [cycle for _, cycle in sorted(cycles.items()) if cycle.keys() == names]


def mean_contexts(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Tokens of a request in the steps of each policy."""
    contexts: dict[str, list[int]] = defaultdict(list)
    for step in steps:
        contexts[step["name"]].append(step["context"])
    return {name: statistics.mean(of_name) for name, of_name in contexts.items()}


@dataclass(frozen=True)
class Point:
    """One load."""

    context: int
    batch: int
    cycles: list[Cycle]
    predicted: list[float] | None  # S(B,0), S(B,1), ... as the server held them last
    contexts: Mapping[str, float]

    @property
    def others(self) -> list[str]:
        return sorted(self.cycles[0].keys() - {ADAPTIVE})

    @property
    def fixed(self) -> list[str]:
        """K = 0, 1, ..."""
        return [name for name in self.others if name != PLAIN]

    def rate(self, name: str) -> float:
        return total(self.cycles, name).rate

    def rates(self) -> dict[str, float]:
        return {name: self.rate(name) for name in [PLAIN, *self.fixed, ADAPTIVE]}

    def over(self, other: str) -> dict[str, float]:
        """The server's own choice over ``other``."""
        return self._over([cycle[other] for cycle in self.cycles])

    def over_best(self) -> dict[str, float]:
        """Over the fastest of the others, which is chosen for each cycle by the other cycles: by
        all of them it would be the luckiest one."""
        sums = {name: total(self.cycles, name) for name in self.others}

        def best_but_for(cycle: Cycle) -> str:
            def rate(name: str) -> float:
                tokens, seconds = sums[name].tokens, sums[name].seconds
                return (tokens - cycle[name].tokens) / (seconds - cycle[name].seconds)

            return max(self.others, key=rate)

        return self._over([cycle[best_but_for(cycle)] for cycle in self.cycles])

    def _over(self, others: list[Emitted]) -> dict[str, float]:
        """A ratio of rates, and the 95 % bootstrap interval by cycles."""
        pairs = [(cycle[ADAPTIVE], other) for cycle, other in zip(self.cycles, others, strict=True)]

        def ratio(drawn: Sequence[tuple[Emitted, Emitted]]) -> float:
            own, other = (sum(column, Emitted()) for column in zip(*drawn, strict=True))
            return own.rate / other.rate

        rng = random.Random(0)
        drawn = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
        low, high = drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS)]
        return {"ratio": ratio(pairs), "low": low, "high": high}

    def to_json(self) -> dict[str, Any]:
        measured = [self.rate(name) / self.rate(self.fixed[0]) for name in self.fixed]
        errors = [p / m - 1 for p, m in zip(self.predicted or [], measured, strict=False)]
        return {
            "context": self.context,
            "batch": self.batch,
            "cycles": len(self.cycles),
            "mean_context": self.contexts,
            "tok_s": self.rates(),
            "best": max(self.others, key=self.rate),
            "over_best": self.over_best(),
            "over_plain": self.over(PLAIN),
            "speedups": measured,
            "predicted": self.predicted,
            "prediction_error": max(map(abs, errors)) if errors else None,
        }
