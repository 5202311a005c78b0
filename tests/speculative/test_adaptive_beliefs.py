"""What adaptive drafting holds of costs and acceptance, against what they are or draws of them."""

from __future__ import annotations

import math
import random
import statistics
from itertools import chain, repeat

import pytest
from test_adaptive import MAX_DRAFTS, Machine, accepted, mean

from sglang_ascend.speculative.adaptive.costs.every_load import Costs
from sglang_ascend.speculative.adaptive.costs.noise import StepNoise
from sglang_ascend.speculative.adaptive.costs.one_load import LoadCosts
from sglang_ascend.speculative.adaptive.estimates import Acceptance
from sglang_ascend.speculative.adaptive.probes import value_of_knowing


def test_an_acceptance_that_was_never_measured_goes_on_from_the_one_before_it():
    acceptance = Acceptance(3)
    acceptance.record([1] * 900 + [0] * 100, 1)
    first, second, third = acceptance.rates()
    assert first == pytest.approx(0.9, abs=0.01)
    assert second == third == pytest.approx(first)
    acceptance.record([3] * 400 + [1] * 400 + [0] * 200, 3)
    assert acceptance.rates()[1] == pytest.approx(0.5, abs=0.02)
    assert acceptance.rates()[2] > 0.95


def test_an_old_acceptance_fades():
    acceptance = Acceptance(1)
    for accepted_drafts in chain(repeat([1] * 10, 100), repeat([0] * 10, 600)):
        acceptance.record(accepted_drafts, 1)
    assert acceptance.rates()[0] < 0.03


def test_a_pause_does_not_move_a_cost():
    costs = Costs()
    for seconds in [0.01, 0.01, 5.0, 0.01, 0.01]:
        costs.record(4, 100.0, 2, seconds)
    assert costs.of(4, 100.0).seconds((2, 2)) == pytest.approx(0.01, rel=1e-3)


def test_a_machine_that_has_become_slower_is_believed():
    costs = Costs()
    for seconds in [*repeat(0.01, 50), *repeat(0.03, 50)]:
        costs.record(4, 100.0, 2, seconds)
    assert costs.of(4, 100.0).seconds((2, 2)) == pytest.approx(0.03, rel=0.02)


@pytest.mark.parametrize("seconds", [0.001, 0.2])
def test_a_k_that_is_first_asked_for_behind_timed_steps_of_another_stands_beside_those(seconds):
    """The machine is ten times as fast, or twenty times as slow, as it is guessed to be."""
    costs = Costs()
    for _ in range(50):
        costs.record(4, 100.0, 3, seconds)
    assert 0.5 < costs.of(4, 100.0).seconds((0, 0)) / seconds < 1


def test_a_k_that_was_never_run_leaves_the_others_as_sure_as_they_are():
    """K = 1 and 2 were run with shorter contexts, K = 0 was not: it is the first that is asked for
    here, and what its guess was off by says nothing of the others."""
    costs = Costs()
    for k, seconds in ((1, 0.050), (2, 0.070)):
        for _ in range(20):
            costs.record(128, 64.0, k, seconds)
    load = costs.of(128, 256.0)
    for k in range(MAX_DRAFTS + 1):
        load.seconds((k, k))
    assert load.deviation((2, 2), (1, 1)) < 0.5 < load.deviation((2, 2), (0, 0))
    for k, seconds in ((0, 0.025), (2, 0.100)):
        for _ in range(6):
            costs.record(128, 256.0, k, seconds)
    assert load.seconds((2, 2)) / load.seconds((0, 0)) == pytest.approx(4, rel=0.1)


def test_a_k_whose_steps_vary_is_not_taken_for_a_cheaper_one():
    costs = Costs()
    for seconds in [0.010, 0.014] * 8:
        costs.record(4, 100.0, 2, seconds)
    assert costs.of(4, 100.0).seconds((2, 2)) == pytest.approx(0.012, rel=0.03)


def test_the_noise_of_a_step_and_the_drift_between_steps_are_told_apart():
    rng, noise, slower = random.Random(0), StepNoise(), 0.0
    own, drift = [], []
    for step in range(4000):
        slower += rng.gauss(0, 0.07)
        noise.record("a kind", slower + rng.gauss(0, 0.05))
        if step >= 1000:
            own.append(noise.own)
            drift.append(noise.drift)
    assert math.sqrt(mean(own)) == pytest.approx(0.05, rel=0.1)
    assert math.sqrt(mean(drift)) == pytest.approx(0.07, rel=0.1)


def error_on_a_drifting_machine(seed: int) -> float:
    """Of what K = 1 is believed to cost over K = 0, where it runs in six steps of 60 and the
    machine's speed wanders."""
    costs, rng, slower = Costs(), random.Random(seed), 0.0
    for step in range(600):
        k = int(step % 60 >= 54)
        slower += rng.gauss(0, 0.02)
        costs.record(4, 100.0, k, 0.01 * math.exp(0.25 * k + slower + rng.gauss(0, 0.05)))
    load = costs.of(4, 100.0)
    return abs(math.log(load.seconds((1, 1)) / load.seconds((0, 0))) - 0.25)


def test_ratios_of_costs_are_learnt_from_neighbouring_steps(monkeypatch):
    error = mean([error_on_a_drifting_machine(seed) for seed in range(20)])
    assert error < 0.03
    # The control: costs that do not drift together.
    monkeypatch.setattr(StepNoise, "drift", 0.0)
    assert mean([error_on_a_drifting_machine(seed) for seed in range(20)]) > 2 * error


def test_a_cost_that_was_not_measured_is_guessed_from_others():
    machine, costs = Machine(), Costs()
    for batch in (1, 4, 16, 64):
        for k in range(MAX_DRAFTS + 1):
            for _ in range(3):
                costs.record(batch, 500.0, k, machine.seconds(batch, 500.0, k))
    for batch in (2, 8, 32):
        for k in range(MAX_DRAFTS + 1):
            share = costs.of(batch, 500.0).seconds((k, k)) / machine.seconds(batch, 500.0, k)
            assert 0.6 < share < 1.25, (batch, k, share)


# Seconds of K = 0, 1, 2 and 3 of nano-deepseek, as `benchmarks.adaptive` measured them (docs).
SECONDS = {
    1: [0.0113, 0.0151, 0.0147, 0.0160],
    16: [0.0205, 0.0311, 0.0380, 0.0487],
    128: [0.0516, 0.0934, 0.1413, 0.1810],
}


def guess_of_the_longest_chain() -> float:
    """Of K = 3 with 128 requests over what it takes; the other K are measured."""
    costs, longest = Costs(), (MAX_DRAFTS, MAX_DRAFTS)
    for batch, seconds in SECONDS.items():
        costs.of(batch, 64.0).seconds(longest)  # is asked for when the load begins
        for k in range(MAX_DRAFTS + (batch < 128)):
            for _ in range(12):
                costs.record(batch, 64.0, k, seconds[k])
    return costs.of(128, 64.0).seconds(longest) / SECONDS[128][-1]


def test_what_a_load_has_had_says_what_the_others_take_there(monkeypatch):
    assert guess_of_the_longest_chain() == pytest.approx(1, abs=0.05)
    # The control: a guess stands once it was made.
    monkeypatch.setattr(LoadCosts, "guess_anew", lambda load: None)
    assert guess_of_the_longest_chain() != pytest.approx(1, abs=0.2)


def test_the_worth_of_knowing_a_gain_is_what_is_gained_by_choosing_with_it():
    """Against draws: with the gain known the better of the two is taken, without it the mean's."""
    rng = random.Random(0)
    for mean_gain, deviation in ((0.0, 0.1), (0.05, 0.1), (-0.2, 0.1)):
        draws = [rng.gauss(mean_gain, deviation) for _ in range(200_000)]
        worth = mean([max(0.0, gain) for gain in draws]) - max(0.0, mean_gain)
        assert value_of_knowing(mean_gain, deviation) == pytest.approx(worth, abs=5e-4)


def test_the_doubt_about_expected_tokens_is_that_of_the_counts():
    """Against counts drawn anew many times."""
    rng, rates, steps = random.Random(0), [0.8, 0.6, 0.5], 300
    logs = []
    for _ in range(400):
        acceptance = Acceptance(MAX_DRAFTS)
        acceptance.record(accepted(rng, rates, steps, MAX_DRAFTS), MAX_DRAFTS)
        expected = acceptance.expected_tokens()
        logs.append(math.log(expected[3] / expected[1]))
    assert acceptance.doubt(3, 1) == pytest.approx(statistics.stdev(logs), rel=0.15)
