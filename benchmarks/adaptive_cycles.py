"""Rates of policies that took turns of steps, on a machine whose speed wanders.

The log time of a step is that of its kind (how many drafts it verified, and how many it drafted),
plus a random walk that the machine takes from step to step, plus noise of its own. So kinds are
compared by generalised least squares, which weighs steps near to each other most. By how much the
machine walks decides weights only; intervals come from the cycles.

Who chose K changes neither what its step takes, but for the time of choosing, which is measured by
itself, nor how many drafts are kept, which is the text's. So kinds, and acceptance, are those of
the steps of all policies: by their own few steps alone one would have had the luckier text, or the
faster moments. Whether that is so is told too (``Cycles.own_over_fixed``).
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

from benchmarks.turn_state import ADAPTIVE, PLAIN
from sglang_ascend.speculative.adaptive.costs.noise import StepNoise

# A step that takes so many times what others of its kind do met a pause of the machine.
PAUSE = 3.0
# Of the largest eigenvalue. No cost is known but up to the machine's speed, which they all share.
RANK = 1e-9

Array = NDArray[np.float64]
Step = Mapping[str, Any]
Kind = tuple[str, int, int]  # a policy, drafts that are verified, drafts that are drafted


@dataclass(frozen=True)
class Cycles:
    """What all policies did in their turns, cycle by cycle; the first axis is that of cycles."""

    kinds: list[Kind]
    information: Array  # [cycles, kinds, kinds], of the log times of the kinds
    score: Array  # [cycles, kinds]: information times the log times that fit best
    steps: Array  # [cycles, kinds]
    choosing: Array  # [cycles, names], seconds, which are in no step's time
    chains: Array  # [cycles, names, K + 1]: chains of 0, 1, ... drafts that were verified
    kept: Array  # [cycles, K + 1]: chains whose drafts 1 to j were kept, and with j = 0 all
    judged: Array  # [cycles, K + 1]: those whose drafts 1 to j - 1 were, of j drafts or more
    tokens: Array  # [cycles, names, K + 1], that steps of such chains emitted
    seconds: Array  # [cycles]

    @property
    def names(self) -> list[str]:
        return sorted({name for name, _, _ in self.kinds})

    def __len__(self) -> int:
        return len(self.seconds)

    def rates(self, weights: Array) -> Array:
        """Tokens/s ``[draws, names]`` of so much of each cycle, ``weights [draws, cycles]``."""
        seconds = self._seconds(weights, self._alike()) + weights @ self.choosing
        return self.expected_tokens(weights) / seconds

    def own_over_fixed(self) -> tuple[float, float] | None:
        """(seconds, tokens) of a step of the own choice over those of a step with the same K of the
        policy that has no other, on average over the own choice's steps; None if it had none."""
        (costs,) = self._costs(np.ones((1, len(self))), np.eye(len(self.kinds)))
        cost_of = dict(zip(self.kinds, costs, strict=True))
        chains, tokens = self.chains.sum(0), self.tokens.sum(0)
        slower, counts, emitted, expected = [], [], [], []
        for k, name in enumerate(f"K = {k}" for k in range(chains.shape[1])):
            kinds = (ADAPTIVE, k, k), (name, k, k)
            if not set(kinds) <= set(self.kinds):
                continue
            own, fixed = (self.names.index(of) for of, *_ in kinds)
            slower.append(np.log(cost_of[kinds[0]] / cost_of[kinds[1]]))
            counts.append(chains[own, k])
            emitted.append(tokens[own, k])
            expected.append(chains[own, k] * tokens[fixed, k] / chains[fixed, k])
        if not counts:
            return None
        slowness = np.exp(np.average(slower, weights=counts))
        return float(slowness), float(sum(emitted) / sum(expected))

    def _alike(self) -> Array:
        """[kinds, others]: steps of the server with drafts are alike whoever chose."""
        kinds = [(name == PLAIN, *lengths) for name, *lengths in self.kinds]
        return np.array([[kind == other for other in sorted(set(kinds))] for kind in kinds], float)

    def _seconds(self, weights: Array, alike: Array) -> Array:
        """``[draws, names]`` at the mean speed of the machine; ``alike`` [kinds, others] says which
        kinds take the same time."""
        times = (weights @ self.steps) * self._costs(weights, alike)
        times *= (weights @ self.seconds / times.sum(1))[:, None]
        of_name = np.array([[name == kind[0] for name in self.names] for kind in self.kinds])
        return times @ of_name

    def _costs(self, weights: Array, alike: Array) -> Array:
        """``[draws, kinds]``, up to the machine's speed."""
        information = np.einsum("dc,cij,ia,jb->dab", weights, self.information, alike, alike)
        inverse = np.linalg.pinv(information, rcond=RANK, hermitian=True)
        costs = np.exp(np.einsum("dab,db->da", inverse, weights @ self.score @ alike))
        return costs @ alike.T

    def expected_tokens(self, weights: Array) -> Array:
        """``[draws, names]``, of the chains of each policy: E(K) = 1 + a_1 + a_1 a_2 + ..., with
        the acceptance of all."""
        kept, judged = weights @ self.kept, weights @ self.judged
        rates = np.divide(kept, judged, out=np.zeros_like(kept), where=judged > 0)
        of_chain = np.cumprod(rates, axis=1).cumsum(1)
        return np.einsum("dc,cnk,dk->dn", weights, self.chains, of_chain)


def cycles_of(steps: Sequence[Step]) -> Cycles:
    """Those in which every policy had a turn, of steps in the order of time.

    A step has ``name``, ``run`` and ``cycle`` it is of, ``requests``, how many drafts each one's
    ``chain`` had, by how many requests 1, 2, ... of them were ``kept``, the ``drafts`` of the next
    chain, ``seconds``, and those of them for ``choosing``.
    """
    kinds_of_steps = [(step["name"], step["chain"], step["drafts"]) for step in steps]
    log_times = _log_times(steps, kinds_of_steps)
    own, drift = _noise(kinds_of_steps, log_times)
    names, kinds = sorted({step["name"] for step in steps}), sorted(set(kinds_of_steps))
    longest = max(step["chain"] for step in steps)
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
        done = Counter(kinds_of_steps[i] for i in cycle)
        rows.append(
            (
                information,
                score,
                np.array([done[kind] for kind in kinds], float),
                *_of_names([steps[i] for i in cycle], names, longest),
                np.exp(log_times[cycle]).sum(),
            )
        )
    return Cycles(kinds, *(np.array(column) for column in zip(*rows, strict=True)))


def _of_names(steps: Sequence[Step], names: list[str], longest: int) -> tuple[Array, ...]:
    """``choosing``, ``chains``, ``kept``, ``judged`` and ``tokens`` of a cycle."""
    choosing = np.zeros(len(names))
    chains, tokens = np.zeros((2, len(names), longest + 1))
    kept, judged = np.zeros(longest + 1), np.zeros(longest + 1)
    for step in steps:
        name, length, requests = names.index(step["name"]), step["chain"], step["requests"]
        # A chain whose end is repeated may keep more than were drafted.
        of_drafts = [requests, *step["kept"][:length]]
        choosing[name] += step["choosing"]
        chains[name, length] += requests
        tokens[name, length] += requests + sum(step["kept"])
        kept[: length + 1] += of_drafts
        judged[: length + 1] += [requests, *of_drafts[:-1]]
    return choosing, chains, kept, judged, tokens


def _log_times(steps: Sequence[Step], kinds: Sequence[Kind]) -> Array:
    """Logarithms of seconds but for choosing, of a pause those of ``PAUSE`` steps."""
    times = [step["seconds"] - step["choosing"] for step in steps]
    of_kind: dict[Kind, list[float]] = defaultdict(list)
    for seconds, kind in zip(times, kinds, strict=True):
        of_kind[kind].append(seconds)
    most = {kind: PAUSE * statistics.median(seconds) for kind, seconds in of_kind.items()}
    return np.log([min(time, most[kind]) for time, kind in zip(times, kinds, strict=True)])


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
