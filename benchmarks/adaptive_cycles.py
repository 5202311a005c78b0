"""Rates of policies that took turns of steps, on a machine whose speed wanders.

The log time of a step is that of its kind (policy, K, and whether K has just changed), plus a
random walk that the machine takes from step to step, plus noise of its own. So kinds are compared
by generalised least squares, which weighs steps near to each other most. By how much the machine
walks decides weights only; intervals come from the cycles.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_ascend.speculative.adaptive.costs.noise import StepNoise

# A step that takes so many times what others of its kind do met a pause of the machine.
PAUSE = 3.0
# Of the largest eigenvalue. No cost is known but up to the machine's speed, which they all share.
RANK = 1e-9

Array = NDArray[np.float64]
Step = Mapping[str, Any]
Kind = tuple[str, int | None, bool]


@dataclass(frozen=True)
class Cycles:
    """What all policies did in their turns, cycle by cycle; the first axis is that of cycles."""

    kinds: list[Kind]
    information: Array  # [cycles, kinds, kinds], of the log times of the kinds
    score: Array  # [cycles, kinds]: information times the log times that fit best
    steps: Array  # [cycles, kinds]
    tokens: Array  # [cycles, names]
    seconds: Array  # [cycles]

    @property
    def names(self) -> list[str]:
        return sorted({name for name, _, _ in self.kinds})

    def __len__(self) -> int:
        return len(self.seconds)

    def rates(self, weights: Array) -> Array:
        """Tokens/s ``[draws, names]`` of so much of each cycle, ``weights [draws, cycles]``."""
        information = np.einsum("dc,cij->dij", weights, self.information)
        inverse = np.linalg.pinv(information, rcond=RANK, hermitian=True)
        costs = np.exp(np.einsum("dij,dj->di", inverse, weights @ self.score))
        times = (weights @ self.steps) * costs
        # At the mean speed of the machine.
        times *= (weights @ self.seconds / times.sum(1))[:, None]
        of_name = np.array([[name == kind[0] for name in self.names] for kind in self.kinds])
        return (weights @ self.tokens) / (times @ of_name)


def cycles_of(steps: Sequence[Step]) -> Cycles:
    """Those in which every policy had a turn, of steps in the order of time.

    A step has ``name``, ``drafts`` but for the plain server's, ``run`` and ``cycle`` it is of,
    ``tokens`` and ``seconds``.
    """
    kinds_of_steps = _kinds(steps)
    log_times = _log_times(steps, kinds_of_steps)
    own, drift = _noise(kinds_of_steps, log_times)
    names, kinds = sorted({step["name"] for step in steps}), sorted(set(kinds_of_steps), key=str)
    cycles: dict[int, list[int]] = defaultdict(list)
    for i, step in enumerate(steps):
        cycles[step["cycle"]].append(i)
    rows: list[tuple[Array, ...]] = []
    for cycle in cycles.values():
        if {steps[i]["name"] for i in cycle} != set(names):
            continue
        information, score = np.zeros((len(kinds), len(kinds))), np.zeros(len(kinds))
        for _, of_run in groupby(cycle, key=lambda i: steps[i]["run"]):
            run = list(of_run)
            is_kind = np.array([[kinds_of_steps[i] == kind for kind in kinds] for i in run], float)
            precision = _precision([steps[i]["name"] for i in run], own, drift)
            information += is_kind.T @ precision @ is_kind
            score += is_kind.T @ precision @ log_times[run]
        done, tokens = Counter(kinds_of_steps[i] for i in cycle), Counter[str]()
        for i in cycle:
            tokens[steps[i]["name"]] += steps[i]["tokens"]
        rows.append(
            (
                information,
                score,
                np.array([done[kind] for kind in kinds], float),
                np.array([tokens[name] for name in names], float),
                np.exp(log_times[cycle]).sum(),
            )
        )
    return Cycles(kinds, *(np.array(column) for column in zip(*rows, strict=True)))


def _kinds(steps: Sequence[Step]) -> list[Kind]:
    """A step whose K is not that of the step before catches up, or verifies another length."""
    befores = [None, *steps]
    return [
        (
            step["name"],
            step.get("drafts"),
            before is not None
            and before["name"] == step["name"]
            and before.get("drafts") != step.get("drafts"),
        )
        for before, step in zip(befores, steps, strict=False)
    ]


def _log_times(steps: Sequence[Step], kinds: Sequence[Kind]) -> Array:
    """Logarithms of seconds, of a pause those of ``PAUSE`` steps."""
    of_kind: dict[Kind, list[float]] = defaultdict(list)
    for step, kind in zip(steps, kinds, strict=True):
        of_kind[kind].append(step["seconds"])
    most = {kind: PAUSE * statistics.median(seconds) for kind, seconds in of_kind.items()}
    return np.log(
        [min(step["seconds"], most[kind]) for step, kind in zip(steps, kinds, strict=True)]
    )


def _noise(kinds: Sequence[Kind], log_times: Array) -> tuple[float, float]:
    """Variances of a step by itself, and of the machine from one step to the next."""
    noise = StepNoise()
    for kind, log_time in zip(kinds, log_times, strict=True):
        noise.record(kind, float(log_time))
    return noise.own, noise.drift


def _precision(names: Sequence[str], own: float, drift: float) -> Array:
    """Of the log times of steps behind each other, whatever the machine's speed was at first.

    Between turns of two policies is a step that does not count.
    """
    times = np.cumsum([1, *(1 + (a != b) for a, b in pairwise(names))])
    precision = np.linalg.inv(drift * np.minimum.outer(times, times) + own * np.eye(len(times)))
    weight = precision.sum(1)
    return precision - np.outer(weight, weight) / weight.sum()
