"""Adaptive drafting on times of steps that were served: at their costs, with their noise."""

from __future__ import annotations

import json
import math
import random
from itertools import repeat
from pathlib import Path

from test_adaptive import MAX_DRAFTS, Machine, mean, serve, shares

from sglang_ascend.speculative.adaptive.controller import AdaptiveDrafts
from sglang_ascend.speculative.adaptive.costs.noise import StepNoise
from sglang_ascend.speculative.adaptive.costs.run import Run

RECORDED = json.loads((Path(__file__).parents[1] / "data/recorded_steps.json").read_text())
RATES = [0.79, 0.74, 0.68]  # of nano-deepseek's drafts
STEPS, SEEDS = 1500, 4  # of each load, and runs of them all


class Recorded(Machine):
    """A load's costs, and what its steps took over them, one behind the other from any on."""

    def __init__(self, load: dict, rng: random.Random, pauses: bool) -> None:
        super().__init__(rates=RATES)
        self.ms, self.pauses = load["ms"], pauses
        self._paused, self._slower = 0, 1.0  # steps that are left of a pause, and its times
        self.noise = RECORDED["log_noise_percent"][str(load["batch"])]
        self._next = rng.randrange(len(self.noise))

    def seconds(self, batch: int, context: float, k: int) -> float:
        return self.ms[k] / 1e3

    def disturbance(self, rng: random.Random) -> float:
        """With ``pauses`` one step in 60 begins one of up to eight steps, twice to five times as
        long."""
        self._next = (self._next + 1) % len(self.noise)
        times = math.exp(self.noise[self._next] / 100)
        if self._paused == 0 and self.pauses and rng.random() < 1 / 60:
            self._paused, self._slower = rng.choice([1, 2, 3, 3, 4, 5, 8]), rng.uniform(2, 5)
        if self._paused:
            self._paused -= 1
            times *= self._slower * math.exp(rng.gauss(0, 0.3))
        return times


def replay(pauses: bool) -> tuple[list[float], float]:
    """(worth of the best K's at each load, by how much a belief S(B,K) is off on average)."""
    worth, errors = [[] for _ in RECORDED["loads"]], []
    for seed in range(SEEDS):
        drafts, rng = AdaptiveDrafts(MAX_DRAFTS), random.Random(seed)
        for i, load in enumerate(RECORDED["loads"]):
            machine, at = Recorded(load, rng, pauses), (load["batch"], float(load["context"]))
            steps = shares(serve(drafts, machine, repeat(at, STEPS), seed))
            worth[i] += steps[STEPS // 5 :]
            true = [machine.value(*at, k) / machine.value(*at, 0) for k in range(MAX_DRAFTS + 1)]
            believed = drafts.speedups(*at)
            errors.append(max(abs(b / t - 1) for b, t in zip(believed, true, strict=True)))
    return list(map(mean, worth)), mean(errors)


def test_the_best_k_is_found_at_every_served_load(monkeypatch):
    worth, error = replay(pauses=False)
    assert min(worth) >= 0.97, worth
    assert error <= 0.1
    # The control: what one step takes is held to say nothing of the next one.
    monkeypatch.setattr(StepNoise, "drift", 0.0)
    worth, without = replay(pauses=False)
    assert (min(worth) < 0.97 or without > 0.1) and without > error + 0.03


def test_the_best_k_is_found_on_a_machine_that_pauses_too(monkeypatch):
    worth, error = replay(pauses=True)
    assert min(worth) >= 0.97, worth
    assert error <= 0.15
    # The control: each jump of the machine may be in part one cost's.
    monkeypatch.setattr(Run, "_doubtful", lambda run, innovation: innovation)
    worth, without = replay(pauses=True)
    assert min(worth) < 0.95 and without > 1.5 * error
