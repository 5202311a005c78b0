"""Rates of policies that took turns of steps, on a machine whose speed wanders.

The log time of a step is that of its kind (how many drafts it verified, and how many it drafted),
plus a random walk that the machine takes from step to step, plus noise of its own. So kinds are
compared by generalised least squares, which weighs steps near to each other most, and where the
machine paused or jumped little (`wandering.py`). That decides weights only; intervals come from the
cycles.

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
from itertools import groupby, pairwise, product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.turn_state import ADAPTIVE, PLAIN, UNCOUNTED
from benchmarks.wandering import RANK, Array, Block, Wandering
from sglang_ascend.speculative.adaptive.costs.noise import StepNoise
from sglang_ascend.speculative.adaptive.value import expected_by_drafts

# A step that takes so many times what others of its kind do met a pause of the machine.
PAUSE = 3.0

Step = Mapping[str, Any]
Kind = tuple[str, int, int]  # a policy, drafts that are verified, drafts that are drafted


class Alike(NamedTuple):
    """Of a step of the own choice over one with the same K of the policy that has no other."""

    seconds: float
    tokens: float


@dataclass(frozen=True)
class Cycles:
    """What all policies did in their turns, cycle by cycle; the first axis is that of cycles."""

    kinds: list[Kind]
    information: Array  # [cycles, kinds, kinds], of the log times of the kinds
    score: Array  # [cycles, kinds]: information times the log times that fit best
    steps: Array  # [cycles, kinds]
    choosing: Array  # [cycles, names], seconds, which are in no step's time
    # [cycles, names, K + 1, K + 1]: of chains of 0, 1, ... drafts those that kept j or more.
    kept: Array
    seconds: Array  # [cycles]

    @property
    def names(self) -> list[str]:
        return sorted({name for name, _, _ in self.kinds})

    def __len__(self) -> int:
        return len(self.seconds)

    def rates(self, weights: Array) -> Array:
        """Tokens/s ``[draws, names]`` of so much of each cycle, ``weights [draws, cycles]``."""
        times = (weights @ self.steps) * self._costs(weights, self._alike())
        # At the mean speed of the machine.
        times *= (weights @ self.seconds / times.sum(1))[:, None]
        of_name = np.array([[name == kind[0] for name in self.names] for kind in self.kinds])
        return self._expected_tokens(weights) / (times @ of_name + weights @ self.choosing)

    def own_over_fixed(self) -> Alike | None:
        """On average over the own choice's steps with a K that another policy always has; None if
        it had none."""
        (costs,) = self._costs(np.ones((1, len(self))), np.eye(len(self.kinds)))
        kept = self.kept.sum(0)
        slower, counts, emitted, expected = [], [], [], []
        for (i, own), (j, fixed) in product(enumerate(self.kinds), repeat=2):
            if own[0] != ADAPTIVE or fixed[0] in (ADAPTIVE, PLAIN) or own[1:] != fixed[1:]:
                continue
            of_own, of_fixed = (kept[self.names.index(name), k] for name, k, _ in (own, fixed))
            slower.append(np.log(costs[i] / costs[j]))
            counts.append(of_own[0])
            emitted.append(of_own.sum())
            expected.append(of_own[0] * of_fixed.sum() / of_fixed[0])
        if not counts:
            return None
        seconds = np.exp(np.average(slower, weights=counts))
        return Alike(float(seconds), float(sum(emitted) / sum(expected)))

    def _alike(self) -> Array:
        """[kinds, others]: steps of the server with drafts are alike whoever chose."""
        kinds = [(name == PLAIN, *lengths) for name, *lengths in self.kinds]
        return np.array([[kind == other for other in sorted(set(kinds))] for kind in kinds], float)

    def _costs(self, weights: Array, alike: Array) -> Array:
        """``[draws, kinds]``, up to the machine's speed; ``alike`` [kinds, others] says which kinds
        take the same time."""
        information = np.einsum("dc,cij,ia,jb->dab", weights, self.information, alike, alike)
        inverse = np.linalg.pinv(information, rcond=RANK, hermitian=True)
        costs = np.exp(np.einsum("dab,db->da", inverse, weights @ self.score @ alike))
        return costs @ alike.T

    def _expected_tokens(self, weights: Array) -> Array:
        """``[draws, names]``, of each policy's chains with the acceptance of all."""
        kept = np.einsum("dc,cnkj->dkj", weights, self.kept)
        # A chain whose end is repeated may keep more than were drafted.
        is_drafted = np.tri(kept.shape[1])[:, 1:]
        kept, judged = ((of * is_drafted).sum(1) for of in (kept[..., 1:], kept[..., :-1]))
        rates = np.divide(kept, judged, out=np.zeros_like(kept), where=judged > 0)
        of_chain = np.array([expected_by_drafts(of_draw) for of_draw in rates])
        return np.einsum("dc,cnk,dk->dn", weights, self.kept[..., 0], of_chain)


def cycles_of(steps: Sequence[Step]) -> Cycles:
    """Those in which every policy had a turn, of steps in the order of time.

    A step has ``name``, ``run`` and ``cycle`` it is of, ``requests``, how many drafts each one's
    ``chain`` had, by how many requests 1, 2, ... of them were ``kept``, the ``drafts`` of the next
    chain, ``seconds``, and those of them for ``choosing``.
    """
    kinds_of_steps = [(step["name"], step["chain"], step["drafts"]) for step in steps]
    log_times = _log_times(steps, kinds_of_steps)
    names, kinds = sorted({step["name"] for step in steps}), sorted(set(kinds_of_steps))
    lengths = 1 + max(len(step["kept"]) for step in steps)
    cycles: dict[int, list[int]] = defaultdict(list)
    for i, step in enumerate(steps):
        cycles[step["cycle"]].append(i)
    whole = [cycle for cycle in cycles.values() if {steps[i]["name"] for i in cycle} == set(names)]
    is_kind = np.array([[kind == other for other in kinds] for kind in kinds_of_steps], float)
    is_steady = np.array([verified == drafted for _, verified, drafted in kinds_of_steps])

    def block_of(run: list[int]) -> Block:
        gaps = _gaps([steps[i]["name"] for i in run])
        return Block(is_kind[run], log_times[run], gaps, is_steady[run])

    runs = [
        (number, list(run))
        for number, cycle in enumerate(whole)
        for _, run in groupby(cycle, key=lambda i: steps[i]["run"])
    ]
    noise = _noise(kinds_of_steps, log_times)
    found = Wandering([block_of(run) for _, run in runs], *noise).information()
    of_cycle = np.array([[number == n for number, _ in runs] for n in range(len(whole))], float)
    rows: list[tuple[Array, ...]] = []
    for cycle, information, score in zip(
        whole, *(np.tensordot(of_cycle, of_runs, 1) for of_runs in found), strict=True
    ):
        done = Counter(kinds_of_steps[i] for i in cycle)
        rows.append(
            (
                information,
                score,
                np.array([done[kind] for kind in kinds], float),
                *_of_names([steps[i] for i in cycle], names, lengths),
                np.exp(log_times[cycle]).sum(),
            )
        )
    return Cycles(kinds, *(np.array(column) for column in zip(*rows, strict=True)))


def _of_names(steps: Sequence[Step], names: list[str], lengths: int) -> tuple[Array, Array]:
    """``choosing`` and ``kept`` of a cycle."""
    choosing, kept = np.zeros(len(names)), np.zeros((len(names), lengths, lengths))
    for step in steps:
        name, counts = names.index(step["name"]), [step["requests"], *step["kept"]]
        choosing[name] += step["choosing"]
        kept[name, step["chain"], : len(counts)] += counts
    return choosing, kept


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


def _gaps(names: Sequence[str]) -> Array:
    """Steps since the one before: between turns of two policies are some that do not count."""
    return np.array([1, *(1 + UNCOUNTED * (a != b) for a, b in pairwise(names))], float)
