"""The figures and the plot of `python -m benchmarks.adaptive`, of steps that are given."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import wandering as wandering_noise
from benchmarks.adaptive_cycles import PAUSE, Cycles, cycles_of
from benchmarks.adaptive_plot import draw
from benchmarks.adaptive_points import Point, mean_speedups, prediction_errors

SECONDS = {"plain": 0.010, "K = 0": 0.011, "K = 1": 0.013, "adaptive": 0.012}
NAMES = list(SECONDS)


def step(name: str, cycle: int, tokens: float, seconds: float, **known: Any) -> dict[str, Any]:
    """By default of as many requests, which emit a token each, and chosen in no time."""
    chain = {"requests": tokens, "chain": 0, "kept": [], "drafts": 0}
    times = {"seconds": seconds, "choosing": 0.0}
    return {"name": name, "run": 0, "cycle": cycle, **times, **chain, **known}


def none_kept(chain: int, drafts: int) -> dict[str, Any]:
    return {"chain": chain, "drafts": drafts, "kept": [0] * chain}


def wandering(
    seconds: Mapping[str, float], cycles: int, seed: int, drift: float = 0.07, noise: float = 0.05
) -> list[dict[str, Any]]:
    """Turns of eight steps of one token and a K of its own, in random order, on a machine whose
    speed wanders (by 0.35 about its mean, of logarithms, and 0.07 from a step to the next)."""
    rng = random.Random(seed)
    steps, slowness = [], 0.0
    for cycle in range(cycles):
        for k, name in rng.sample(list(enumerate(seconds)), len(seconds)):
            for i in range(9):
                slowness = 0.98 * slowness + rng.gauss(0, drift)
                time = seconds[name] * math.exp(slowness + rng.gauss(0, noise))
                steps += [step(name, cycle, 1, time, **none_kept(k, k))] * (i > 0)
    return steps


def rates_of(cycles: Cycles) -> dict[str, float]:
    return dict(zip(cycles.names, cycles.rates(np.ones((1, len(cycles))))[0], strict=True))


def point(batch: int, plain: float, fixed: float, adaptive: float) -> dict[str, Any]:
    rates = {"plain": plain, "K = 0": 0.98 * plain, "K = 1": fixed, "adaptive": adaptive}
    steps = [step(name, cycle, rate, 1.0) for cycle in range(3) for name, rate in rates.items()]
    return Point(64, batch, cycles_of(steps), [1.0, 1.5], {}).to_json()


def test_the_own_choice_is_compared_with_the_fastest_other_one():
    small, large = point(1, 10.0, 20.0, 19.0), point(32, 100.0, 50.0, 99.0)
    assert (small["best"], large["best"]) == ("K = 1", "plain")
    assert small["over_best"]["ratio"] == pytest.approx(0.95)
    assert large["over_plain"]["ratio"] == pytest.approx(0.99)
    assert large["over_best"]["ratio"] == pytest.approx(0.99)
    assert small["speedups"] == [1.0, pytest.approx(2 / 0.98)]
    assert small["prediction_errors"]["largest"] == pytest.approx(1 - 1.5 / (2 / 0.98))


def test_what_its_own_choice_verified_is_counted():
    own = [("adaptive", 0), ("adaptive", 0), ("adaptive", 2), ("K = 0", 0), ("plain", 0)]
    steps = [step(name, cycle, 1, 0.1, **none_kept(k, k)) for cycle in range(2) for name, k in own]
    found = Point(64, 1, cycles_of(steps), [1.0, 1.5, 2.0, 2.5], {}).to_json()
    assert found["own_steps"] == [4, 0, 2]
    # Beliefs in a K that had no turns of its own are compared with nothing.
    assert (found["speedups"], found["predicted"]) == ([1.0], [1.0, 1.5, 2.0, 2.5])
    assert found["prediction_errors"] is None


def test_a_belief_is_wrong_by_the_k_that_it_leads_to_and_by_all():
    errors = prediction_errors([1.0, 1.5, 1.2], [1.0, 1.6, 1.6])
    assert errors == {"best": pytest.approx(1 / 16), "largest": pytest.approx(1 / 4)}


def test_what_the_server_believed_is_that_of_all_its_turns():
    assert mean_speedups([[1.0, 1.2], [1.0, 1.2], [1.0, 0.6]]) == [
        1.0,
        pytest.approx((1.2 * 1.2 * 0.6) ** (1 / 3)),
    ]
    assert mean_speedups([]) is None


def test_steps_are_compared_with_their_neighbours():
    """So that a speed that wanders twofold hides little. Control: tokens over sums of seconds."""
    errors: dict[str, list[float]] = {"neighbours": [], "sums": []}
    for seed in range(20):
        steps = wandering(SECONDS, 60, seed)
        by_neighbours = rates_of(cycles_of(steps))
        by_sums = {
            name: 1 / statistics.mean(step["seconds"] for step in steps if step["name"] == name)
            for name in NAMES
        }
        for way, rates in (("neighbours", by_neighbours), ("sums", by_sums)):
            ratio = rates["adaptive"] / rates["K = 1"]
            errors[way].append(abs(math.log(ratio * SECONDS["adaptive"] / SECONDS["K = 1"])))
    of_neighbours, of_sums = (statistics.mean(errors[way]) for way in errors)
    assert of_neighbours < 0.02
    assert of_neighbours < 0.7 * of_sums


def jumping(cycles: int, seed: int) -> list[dict[str, Any]]:
    """The same turns on a machine that is steady but for a jump now and then, or a pause."""
    rng = random.Random(seed)
    steps, slowness = [], 0.0
    for cycle in range(cycles):
        for k, name in rng.sample(list(enumerate(SECONDS)), len(SECONDS)):
            for _ in range(8):
                slowness += rng.gauss(0, 0.3 if rng.random() < 0.05 else 0.005)
                pause = 0.5 if rng.random() < 0.05 else 0.0
                time = SECONDS[name] * math.exp(slowness + pause + rng.gauss(0, 0.01))
                steps.append(step(name, cycle, 1, time, **none_kept(k, k)))
    return steps


def test_a_jump_or_a_pause_of_the_machine_says_little(monkeypatch):
    """Control: all steps are trusted alike."""
    errors: dict[int, list[float]] = {wandering_noise.ROUNDS: [], 0: []}
    for rounds, found in errors.items():
        monkeypatch.setattr(wandering_noise, "ROUNDS", rounds)
        for seed in range(10):
            rates = rates_of(cycles_of(jumping(8, seed)))
            ratio = rates["adaptive"] / rates["K = 1"]
            found.append(abs(math.log(ratio * SECONDS["adaptive"] / SECONDS["K = 1"])))
    weighed, alike = map(statistics.mean, errors.values())
    assert weighed < 0.5 * alike


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    truth, found = SECONDS["plain"] / SECONDS["adaptive"], 0
    for seed in range(40):
        over = Point(64, 1, cycles_of(wandering(SECONDS, 25, seed)), None, {}).over("plain")
        found += over["low"] < truth < over["high"]
    assert 34 <= found <= 40


def test_a_dear_step_of_its_own_choice_is_not_taken_for_the_machines():
    """A change of K that catches up takes four steps' time, once in a turn of eight."""
    steps = []
    for cycle in range(20):
        for name in ("plain", "adaptive"):
            for i in range(8):
                lengths, is_dear = (0, 0), False
                if name == "adaptive":
                    lengths, is_dear = (int(i > 4), int(i >= 4)), i == 4
                steps.append(step(name, cycle, 1, 0.04 if is_dear else 0.01, **none_kept(*lengths)))
    rates = rates_of(cycles_of(steps))
    assert rates["plain"] / rates["adaptive"] == pytest.approx((7 + 4) / 8)


def test_the_fastest_other_one_is_chosen_by_other_cycles_than_it_is_compared_in():
    """Policies that are alike, of noisy rates: over the luckiest of all cycles each would lose."""
    ratios, over_luckiest = [], []
    for seed in range(40):
        cycles = cycles_of(wandering(dict.fromkeys(SECONDS, 0.01), 6, seed, 0.4, 0.4))
        point = Point(64, 1, cycles, None, {})
        ratios.append(point.over_best()["ratio"])
        others = [point.rates[name] for name in point.others]
        over_luckiest.append(point.rates["adaptive"] / max(others))
    assert statistics.mean(ratios) == pytest.approx(1.0, abs=0.06)
    assert statistics.mean(over_luckiest) < 0.93


def texts(cycles: int, seed: int, acceptance: Mapping[str, float]) -> list[dict[str, Any]]:
    """Turns of eight steps of one request, each of the same time and of a chain of two drafts."""
    rng = random.Random(seed)
    steps = []
    for cycle in range(cycles):
        for name, rate in acceptance.items():
            for _ in range(8):
                first, second = rng.random() < rate, rng.random() < rate
                kept = {"chain": 2, "kept": [int(first), int(first and second)]}
                steps.append(step(name, cycle, 1, 0.01, drafts=2, **kept))
    return steps


def with_other_texts(seed: int) -> list[dict[str, Any]]:
    return texts(6, seed, {"K = 2": 0.7, "adaptive": 0.7})


def at_other_moments(seed: int) -> list[dict[str, Any]]:
    steps = wandering({"K = 2": 0.01, "adaptive": 0.01}, 6, seed)
    return [{**of, **none_kept(2, 2)} for of in steps]


@pytest.mark.parametrize(
    ("steps_of", "which", "least"), [(at_other_moments, 0, 0.01), (with_other_texts, 1, 0.04)]
)
def test_luck_is_in_no_ratio(steps_of, which, least):
    """Of policies with the same K and the same speed. Control: each by its own steps."""
    errors, of_own_steps = [], []
    for seed in range(20):
        cycles = cycles_of(steps_of(seed))
        rates, alike = rates_of(cycles), cycles.own_over_fixed()
        assert alike is not None
        errors.append(abs(math.log(rates["adaptive"] / rates["K = 2"])))
        of_own_steps.append(abs(math.log(alike[which])))
    assert max(errors) < 1e-6
    assert statistics.mean(of_own_steps) > least


def test_the_time_of_choosing_is_in_a_policy_s_rate_alone():
    steps = [
        step(name, cycle, 1, 0.01 + choosing, choosing=choosing)
        for cycle in range(5)
        for name, choosing in (("K = 0", 0.0), ("adaptive", 0.001))
    ]
    cycles = cycles_of(steps)
    assert rates_of(cycles) == {"K = 0": pytest.approx(100), "adaptive": pytest.approx(100 / 1.1)}
    assert cycles.own_over_fixed() == pytest.approx((1.0, 1.0))


def test_a_policy_whose_steps_take_longer_than_others_of_the_same_k_is_told():
    """For its rate counts them as fast as the others'."""
    steps = wandering({"K = 0": 0.01, "adaptive": 0.012}, 60, 0)
    alike = cycles_of([{**of, **none_kept(0, 0)} for of in steps]).own_over_fixed()
    assert alike is not None
    assert alike.seconds == pytest.approx(1.2, rel=0.02)


def test_a_policy_whose_drafts_are_kept_less_often_is_told():
    """For its rate counts them as kept as often as the others'."""
    alike = cycles_of(texts(400, 0, {"K = 2": 0.7, "adaptive": 0.4})).own_over_fixed()
    assert alike is not None
    assert alike.tokens == pytest.approx((1 + 0.4 + 0.4**2) / (1 + 0.7 + 0.7**2), rel=0.02)


def test_expected_tokens_are_those_of_each_chain_s_length():
    steps = texts(400, 0, {"K = 2": 0.5})
    shorter = [
        {**of, "name": "K = 1", "chain": 1, "kept": of["kept"][:1], "drafts": 1} for of in steps
    ]
    plain = [step("plain", of["cycle"], 1, 0.01) for of in steps]
    rates = rates_of(cycles_of([*plain, *shorter, *steps]))
    found = [rates[name] / rates["plain"] for name in ("K = 1", "K = 2")]
    assert found == [pytest.approx(1.5, rel=0.02), pytest.approx(1.75, rel=0.02)]


def test_a_rate_is_of_whole_cycles_and_a_pause_counts_as_few_steps():
    steps = [step("plain", 1, 1, 0.1), step("adaptive", 1, 2, 0.1, drafts=1)] * 5
    steps += [step("adaptive", 1, 2, 50.0, drafts=1), step("plain", 2, 1, 0.1)]
    cycles = cycles_of(steps)
    assert len(cycles) == 1
    assert cycles.kept.sum((2, 3)).tolist() == [[12, 5]]  # the own choice's, the plain server's
    assert cycles.seconds.tolist() == [pytest.approx(10 * 0.1 + PAUSE * 0.1)]


def test_the_plot_has_a_line_for_each_policy_and_a_dot_for_each_choice():
    points = [point(1, 10.0, 20.0, 19.0), point(32, 100.0, 50.0, 99.0)]
    root = ElementTree.fromstring(draw({"points": points, "model": "m", "machine": "here"}))
    assert len(root.findall("{*}polyline")) == 4
    assert len(root.findall("{*}circle")) == 2
