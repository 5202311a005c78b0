"""The policy of adaptive drafting on simulated servers, whose costs and acceptance are known."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise, repeat

import pytest

from sglang_ascend.speculative.adaptive import load_costs
from sglang_ascend.speculative.adaptive.controller import AdaptiveDrafts
from sglang_ascend.speculative.adaptive.costs import Costs
from sglang_ascend.speculative.adaptive.estimates import Acceptance
from sglang_ascend.speculative.adaptive.probes import value_of_knowing
from sglang_ascend.speculative.adaptive.tuning import Tuning
from sglang_ascend.speculative.adaptive.value import StepCosts, expected_tokens, speedups

MAX_DRAFTS = 3
SIZES = [1, 2, 4, 8, 16, 32, 64, 128]


def test_expected_tokens_count_every_way_a_chain_can_end():
    """Against the sum over the ways: k drafts are kept and the next is not."""
    rates = [0.8, 0.6, 0.3]
    ends = [1 - 0.8, 0.8 * (1 - 0.6), 0.8 * 0.6 * (1 - 0.3), 0.8 * 0.6 * 0.3]
    assert expected_tokens(rates, 3) == pytest.approx(
        sum((k + 1) * share for k, share in enumerate(ends))
    )
    assert expected_tokens(rates, 0) == 1.0
    assert expected_tokens([0.5], 2) == 1.75


def test_a_speedup_is_tokens_over_cost_and_1_without_drafts():
    costs = StepCosts(target=[10.0, 11.0, 12.0], draft=1.0, overhead=0.5)
    assert speedups([0.5, 0.5], costs, 2) == pytest.approx([1.0, 15 / 12.5, 17.5 / 14.5])


@dataclass
class Machine:
    """A step's seconds: weights are read once, then rows are computed; and what it adds to that."""

    rates: list[float] = field(default_factory=lambda: [0.8, 0.7, 0.6])
    weights: float = 10e-3
    per_row: float = 0.4e-3
    draft: float = 1.2e-3
    draft_row: float = 0.05e-3
    per_cached: float = 1e-8
    is_noisy: bool = False

    def seconds(self, batch: int, context: float, k: int) -> float:
        rows = batch * (k + 1)
        target = max(self.weights, rows * self.per_row) + 0.02e-3 * rows
        attention = self.per_cached * batch * context * (1 + 0.1 * k)
        return target + attention + k * (self.draft + batch * self.draft_row)

    def value(self, batch: int, context: float, k: int) -> float:
        return expected_tokens(self.rates, k) / self.seconds(batch, context, k)

    def best(self, batch: int, context: float) -> float:
        return max(self.value(batch, context, k) for k in range(MAX_DRAFTS + 1))


def accepted(rng: random.Random, rates: list[float], batch: int, k: int) -> list[int]:
    counts = []
    for _ in range(batch):
        kept = 0
        while kept < k and rng.random() < rates[kept]:
            kept += 1
        counts.append(kept)
    return counts


def serve(
    drafts: AdaptiveDrafts,
    machine: Machine,
    loads: Iterable[tuple[int, float]],
    seed: int = 0,
) -> Iterator[tuple[int, float]]:
    """(K, what the step was worth of the best K's) of each step, told as a server tells it."""
    rng, verified = random.Random(seed), drafts.max_drafts
    for batch, context in loads:
        drafted = drafts.choose(batch, context)
        kept = accepted(rng, machine.rates, batch, verified)
        drafts.record_acceptance(kept, verified, [drafts.share_sampled == 1] * batch)
        if verified == drafted:
            seconds = machine.seconds(batch, context, verified)
            seconds *= pause(rng) if machine.is_noisy else 1.0
            drafts.record_time(batch, context, verified, seconds)
        yield drafted, machine.value(batch, context, drafted) / machine.best(batch, context)
        verified = drafted


def shares(steps: Iterable[tuple[int, float]]) -> list[float]:
    return [share for _, share in steps]


def flips(steps: list[tuple[int, float]]) -> int:
    return sum(before != after for (before, _), (after, _) in pairwise(steps))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def pause(rng: random.Random) -> float:
    """Up to 15 % more, and one step in 30 that the machine stopped for up to 50 steps."""
    return rng.uniform(1, 1.15) * (rng.uniform(5, 50) if rng.random() < 1 / 30 else 1)


MACHINES = {
    "bandwidth": Machine(),
    "few cores": Machine(weights=20e-3, per_row=9e-3, draft=2e-3, draft_row=0.6e-3),
    "poor drafts": Machine(rates=[0.15, 0.1, 0.1]),
    "good drafts": Machine(rates=[0.95, 0.95, 0.95], per_row=0.05e-3),
    "noise": Machine(is_noisy=True),
    "few cores, noise": Machine(
        weights=20e-3,
        per_row=9e-3,
        draft=2e-3,
        draft_row=0.6e-3,
        is_noisy=True,
    ),
}


@pytest.mark.parametrize("context", [100, 8000])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_the_best_k_is_found_at_every_batch_from_1_to_128_and_back(machine, context):
    drafts = AdaptiveDrafts(MAX_DRAFTS)
    for batch in [*SIZES, *reversed(SIZES)]:
        steps = shares(serve(drafts, machine, repeat((batch, context), 500)))
        assert mean(steps[200:]) >= 0.97, (batch, mean(steps))
        # What finding it cost: the worth of 25 steps in 500 at most.
        assert mean(steps) >= 0.95, (batch, mean(steps))


def test_a_server_that_never_drafts_is_as_good_as_plain():
    machine = Machine(rates=[0.05, 0.05, 0.05], per_row=0.4e-3)
    drafts = AdaptiveDrafts(MAX_DRAFTS)
    steps = shares(serve(drafts, machine, repeat((32, 500), 10_000)))
    assert mean(steps[200:]) >= 0.99


def test_the_k_in_force_follows_acceptance_that_changes():
    drafts = AdaptiveDrafts(MAX_DRAFTS)
    machine = Machine(rates=[0.95, 0.9, 0.9])
    assert next(reversed(list(serve(drafts, machine, repeat((2, 300), 500))))) == (3, 1.0)
    machine.rates = [0.02, 0.02, 0.02]
    list(serve(drafts, machine, repeat((2, 300), 2000)))
    assert drafts.in_force == 0
    machine.rates = [0.95, 0.9, 0.9]
    list(serve(drafts, machine, repeat((2, 300), 6000)))
    assert drafts.in_force == 3


@pytest.mark.parametrize(("before", "after", "best"), [(1, 128, 0), (128, 1, 3)])
def test_a_batch_of_new_requests_has_the_best_k_at_once(before, after, best):
    drafts = AdaptiveDrafts(MAX_DRAFTS)
    for batch in (after, before):
        list(serve(drafts, Machine(), repeat((batch, 500), 500)))
    assert drafts.in_force == MAX_DRAFTS - best
    drafts.start_anew(after, 500)
    assert drafts.in_force == best
    assert drafts.drafts_behind_prompts() == (best > 0)


def turning(tells_classes: bool) -> float:
    """Worth of the best K's where the batch turns from greedy to sampled requests and back."""
    drafts, machine, worth = AdaptiveDrafts(MAX_DRAFTS), Machine(per_row=0.5e-3), []
    for turn in range(10):
        machine.rates = [0.35, 0.3, 0.3] if turn % 2 else [0.85, 0.8, 0.8]
        drafts.share_sampled = float(tells_classes and turn % 2)
        worth += shares(serve(drafts, machine, repeat((12, 500.0), 400)))
    return mean(worth[800:])


def test_the_acceptance_of_a_class_of_requests_comes_back_with_it():
    # The control: one acceptance for all requests follows slowly.
    assert turning(tells_classes=True) >= 0.97 > turning(tells_classes=False) + 0.03


# The batch goes to and fro across the point where drafts cease to pay.
OSCILLATIONS = {
    "every step": lambda: (4 if i % 2 else 24 for i in range(10_000)),
    "every 10 steps": lambda: (4 if i // 10 % 2 else 24 for i in range(10_000)),
    "at random": lambda: map(random.Random(3).randint, repeat(4, 10_000), repeat(28)),
}


def oscillate(name: str, tuning: Tuning) -> tuple[int, float]:
    """(changes of K, worth of the best K's) in 10,000 steps."""
    machine = Machine(rates=[0.6, 0.5, 0.4], per_row=0.5e-3, is_noisy=True)
    drafts = AdaptiveDrafts(MAX_DRAFTS, tuning)
    steps = list(serve(drafts, machine, ((batch, 500.0) for batch in OSCILLATIONS[name]())))
    return flips(steps), mean(shares(steps))


@pytest.mark.parametrize("name", OSCILLATIONS)
def test_oscillation_across_the_threshold_changes_k_a_bounded_number_of_times(name):
    num_flips, _ = oscillate(name, Tuning())
    # A probe changes K twice, and its share of 10,000 steps pays for 50 at most.
    assert num_flips <= 10_000 / Tuning().min_steps + 100, num_flips
    # The control: without hysteresis K changes several times as often.
    without, _ = oscillate(name, Tuning(margin=0.0, switch_cost=0.0, min_steps=0))
    assert without > 3 * num_flips, (without, num_flips)


def test_probes_cost_no_more_than_their_share():
    machine = Machine(rates=[0.05, 0.05, 0.05])
    drafts = AdaptiveDrafts(MAX_DRAFTS)
    list(serve(drafts, machine, repeat((64, 500.0), 1000)))
    steps = list(serve(drafts, machine, repeat((64, 500.0), 20_000)))
    seconds = [machine.seconds(64, 500.0, k) for k, _ in steps]
    lost = sum(s * (1 - share) for s, (_, share) in zip(seconds, steps, strict=True))
    assert 0 < lost <= 1.5 * Tuning().probe_share * sum(seconds)


def test_what_must_be_caught_up_makes_probes_rarer():
    def run(steps: int) -> int:
        machine, drafts = Machine(rates=[0.05, 0.05, 0.05]), AdaptiveDrafts(MAX_DRAFTS)
        list(serve(drafts, machine, repeat((64, 500.0), 1000)))
        seconds = steps * machine.seconds(64, 500.0, 0)
        return sum(drafts.choose(64, 500.0, lambda: seconds) > 0 for _ in range(20_000))

    assert 0 < run(40) < run(0) / 2


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
    for accepted_drafts in chain(repeat([1] * 10, 100), repeat([0] * 10, 300)):
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


def test_a_k_whose_steps_vary_is_not_taken_for_a_cheaper_one():
    costs = Costs()
    for seconds in [0.010, 0.014] * 8:
        costs.record(4, 100.0, 2, seconds)
    assert costs.of(4, 100.0).seconds((2, 2)) == pytest.approx(0.012, rel=0.03)


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
    monkeypatch.setattr(load_costs, "TOGETHER", 0.0)
    assert mean([error_on_a_drifting_machine(seed) for seed in range(20)]) > 2 * error


def after_a_disturbance() -> float:
    """Other work made the first steps slow, those that draft most of all."""
    drafts, slow = AdaptiveDrafts(MAX_DRAFTS), Machine(weights=0.2, per_row=8e-3, draft=0.3)
    list(serve(drafts, slow, repeat((1, 100), 60)))
    assert drafts.in_force == 0
    return mean(shares(serve(drafts, Machine(), repeat((1, 100), 500)))[200:])


def test_what_was_measured_on_a_disturbed_machine_is_forgotten(monkeypatch):
    assert after_a_disturbance() >= 0.97
    monkeypatch.setattr(load_costs, "ALONE_IN_JUMP", 0.0)
    assert after_a_disturbance() < 0.9


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
