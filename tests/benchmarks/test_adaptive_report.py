"""The figures and the plot of `python -m benchmarks.adaptive`, of steps that are given."""

from __future__ import annotations

import random
import statistics
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.adaptive import draw
from benchmarks.adaptive_points import PAUSE, Emitted, Point, cycles_of


def step(name: str, cycle: int, tokens: float, seconds: float, **known: Any) -> dict[str, Any]:
    return {"name": name, "cycle": cycle, "tokens": tokens, "seconds": seconds, **known}


def point(batch: int, plain: float, fixed: float, adaptive: float) -> dict[str, Any]:
    rates = {"plain": plain, "K = 0": 0.98 * plain, "K = 1": fixed, "adaptive": adaptive}
    cycle = {name: Emitted(rate, 1.0) for name, rate in rates.items()}
    return Point(64, batch, [cycle] * 3, [1.0, 1.5], {}).to_json()


def test_the_own_choice_is_compared_with_the_fastest_other_one():
    small, large = point(1, 10.0, 20.0, 19.0), point(32, 100.0, 50.0, 99.0)
    assert (small["best"], large["best"]) == ("K = 1", "plain")
    assert small["over_best"]["ratio"] == pytest.approx(0.95)
    assert large["over_best"]["ratio"] == large["over_plain"]["ratio"] == pytest.approx(0.99)
    assert small["speedups"] == [1.0, pytest.approx(2 / 0.98)]
    assert small["prediction_error"] == pytest.approx(1 - 1.5 / (2 / 0.98))


def test_the_fastest_other_one_is_chosen_by_other_cycles_than_it_is_compared_in():
    """Policies that are alike, of noisy rates: over the luckiest of all cycles each would lose."""
    rng, names = random.Random(0), ["plain", "K = 0", "K = 1", "K = 2", "adaptive"]
    ratios, over_luckiest = [], []
    for _ in range(40):
        cycles = [{name: Emitted(rng.uniform(5, 15), 1.0) for name in names} for _ in range(6)]
        point = Point(64, 1, cycles, None, {})
        ratios.append(point.over_best()["ratio"])
        over_luckiest.append(point.rate("adaptive") / max(map(point.rate, point.others)))
    assert statistics.mean(ratios) == pytest.approx(1.0, abs=0.06)
    assert statistics.mean(over_luckiest) < 0.93


def test_a_rate_is_of_whole_cycles_and_a_pause_counts_as_few_steps():
    steps = [step("plain", 1, 1, 0.1), step("adaptive", 1, 2, 0.1, drafts=1)] * 5
    steps += [step("adaptive", 1, 2, 50.0, drafts=1), step("plain", 2, 1, 0.1)]
    (cycle,) = cycles_of(steps)
    assert cycle["plain"] == Emitted(5, pytest.approx(0.5))
    assert cycle["adaptive"] == Emitted(12, pytest.approx(0.5 + PAUSE * 0.1))


def test_the_plot_has_a_line_for_each_policy_and_a_dot_for_each_choice():
    points = [point(1, 10.0, 20.0, 19.0), point(32, 100.0, 50.0, 99.0)]
    root = ElementTree.fromstring(draw({"points": points, "model": "m", "machine": "here"}))
    assert len(root.findall("{*}polyline")) == 4
    assert len(root.findall("{*}circle")) == 2
