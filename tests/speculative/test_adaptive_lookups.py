"""Adaptive K and lookups together, on simulated servers whose costs and acceptance are known: never
less than either of the two alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from test_adaptive import MACHINES, MAX_DRAFTS, Machine, accepted, pause

from sglang_ascend.speculative.adaptive.beliefs import LookedUp
from sglang_ascend.speculative.adaptive.controller import AdaptiveDrafts
from sglang_ascend.speculative.adaptive.costs import every_load, one_load
from sglang_ascend.speculative.adaptive.costs.every_load import Costs
from sglang_ascend.speculative.adaptive.costs.one_load import LoadCosts
from sglang_ascend.speculative.adaptive.value import expected_tokens
from sglang_ascend.speculative.lookup.choice import Choice, Cost, choose_chains, prior_cost

MOST = 8
CONTEXT = 500.0
# How often a lookup's next draft is right: where a reply copies, where little is equal, and where
# nothing is found.
COPYING, POOR, NOTHING = 0.9, 0.25, 0.0
# Steps that the same is found, on average.
STAYS = 12


def seconds(machine: Machine, batch: int, verified: int, drafted: int) -> float:
    """As ``Machine.seconds``, of which more drafts are verified than drafted, or fewer drafted."""
    drafting = drafted * (machine.draft + batch * machine.draft_row)
    without = verified * (machine.draft + batch * machine.draft_row)
    return machine.seconds(batch, CONTEXT, verified) - without + drafting


@dataclass
class Load:
    """What a lookup finds for each request, step by step."""

    batch: int
    share_copying: float
    rng: random.Random

    def __post_init__(self) -> None:
        self.rates = [self._draw() for _ in range(self.batch)]

    def _draw(self) -> float:
        if self.rng.random() < self.share_copying:
            return COPYING
        return self.rng.choice((POOR, NOTHING))

    def step(self) -> torch.Tensor:
        """float [batch]."""
        goes_on = 1 - 1 / STAYS
        self.rates = [r if self.rng.random() < goes_on else self._draw() for r in self.rates]
        return torch.tensor(self.rates)


class Joint:
    """K by measured costs, and lookups beside it."""

    def __init__(self) -> None:
        self.policy = AdaptiveDrafts(MAX_DRAFTS)

    def num_drafts(self, batch: int, looked_up: LookedUp | None) -> int:
        self.policy.looked_up = looked_up
        return self.policy.choose(batch, CONTEXT)

    def cost(self, batch: int) -> Cost:
        load = self.policy.costs.of(batch, CONTEXT)
        return lambda verified, drafted: load.hopeful_seconds((drafted, verified))

    def choose(self, kept: torch.Tensor, num_drafts: int, rates: list[float]) -> Choice:
        of_mtp = torch.full((len(kept),), expected_tokens(rates, num_drafts) - 1)
        return choose_chains(kept, of_mtp, num_drafts, self.cost(len(kept)))


class AdaptiveAlone(Joint):
    def choose(self, kept, num_drafts, rates):
        return Choice(torch.zeros(len(kept), dtype=torch.bool), 0, 0.0)


class LookupsAlone(Joint):
    """Beside chains of K, by costs that are not measured."""

    def num_drafts(self, batch, looked_up):
        return MAX_DRAFTS

    def cost(self, batch):
        return prior_cost(batch)


class Unmeasured(Joint):
    """The control: lookups are taken by what rows cost elsewhere."""

    def cost(self, batch):
        return prior_cost(batch)


def tokens_per_second(
    make: Callable[[], Joint],
    machine: Machine,
    batch: int,
    share: float,
    steps: range = range(500, 1000),
    seed: int = 0,
) -> float:
    """Of these steps of a server that has just begun; what lookups find goes by ``seed``."""
    server, load = make(), Load(batch, share, random.Random(5 + seed))
    rng = random.Random(1)
    before, drafted_before, verified = None, MAX_DRAFTS, MAX_DRAFTS
    looked_up = torch.zeros(batch, dtype=torch.bool)
    kept_before = torch.zeros(batch, MOST)
    emitted = spent = 0.0
    for step in range(steps.stop):
        drafted = server.num_drafts(batch, before)
        rates = load.step()
        kept = (rates[:, None] ** torch.arange(1, MOST + 1)).cumsum(dim=1)
        choice = server.choose(kept, drafted, machine.rates)
        runs = 0 if bool(choice.is_chosen.all()) else drafted
        # What this step verifies was chosen in the one before.
        time = seconds(machine, batch, max(verified, drafted_before), runs)
        others = batch - int(looked_up.sum())
        right = kept_before[looked_up, verified - 1].sum()
        if step in steps:
            emitted += others * expected_tokens(machine.rates, drafted_before)
            emitted += batch - others + float(right)
            spent += time
        judged = accepted(rng, machine.rates, others, drafted_before)
        server.policy.record_acceptance(judged, drafted_before, [False] * others)
        if drafted == drafted_before:
            time *= pause(rng) if machine.is_noisy else 1.0
            server.policy.record_time(batch, CONTEXT, runs, time, max(verified, drafted_before))
        share_chosen = float(choice.is_chosen.float().mean())
        before = LookedUp(share_chosen, choice.kept, choice.num_drafts) if share_chosen else None
        looked_up, kept_before, verified = choice.is_chosen, kept, choice.num_drafts
        drafted_before = drafted
    return emitted / spent


SLOW = pytest.mark.slow


@pytest.mark.parametrize("share", [0.0, pytest.param(0.3, marks=SLOW), 0.9])
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize(
    "name",
    [
        "bandwidth",
        "few cores",
        *(pytest.param(name, marks=SLOW) for name in ["poor drafts", "noise"]),
    ],
)
def test_the_two_together_are_never_less_than_either(name, batch, share):
    both, adaptive, lookups = (
        tokens_per_second(make, MACHINES[name], batch, share)
        for make in (Joint, AdaptiveAlone, LookupsAlone)
    )
    print(f"{both:.0f} of both, {adaptive:.0f} of adaptive K, {lookups:.0f} of lookups")
    assert both >= 0.97 * max(adaptive, lookups)


def test_by_costs_that_are_not_measured_lookups_lose_where_rows_are_dear():
    """The control."""
    both, adaptive = (
        tokens_per_second(make, MACHINES["few cores"], 32, 0.9)
        for make in (Unmeasured, AdaptiveAlone)
    )
    assert both < 0.9 * adaptive


def test_at_a_new_load_what_is_tried_costs_little(monkeypatch):
    """The first lookups say about what longer ones cost; in the control each has to be tried."""
    machine, batch, first = MACHINES["few cores"], 32, range(400)
    adaptive, both = (
        tokens_per_second(make, machine, batch, 0.1, first) for make in (AdaptiveAlone, Joint)
    )
    monkeypatch.setattr(every_load, "_apart", lambda one, other: math.inf)
    monkeypatch.setattr(LoadCosts, "guess_anew", lambda load: None)
    control = tokens_per_second(Joint, machine, batch, 0.1, first)
    print(f"{adaptive:.1f} of adaptive K, {both:.1f} with lookups, {control:.1f} of the control")
    assert both >= 0.97 * adaptive > control


def test_what_is_dear_is_tried_once_the_load_has_stayed(monkeypatch):
    """Of four batches that find other lookups; in the control all is tried at once."""

    def worth(make: Callable[[], Joint]) -> float:
        machine, share, first = MACHINES["few cores"], 0.3, range(200)
        return sum(tokens_per_second(make, machine, 32, share, first, seed) for seed in range(4))

    adaptive, both = worth(AdaptiveAlone), worth(Joint)
    monkeypatch.setattr(one_load, "STEPS_OF_HOPE", 1e-9)
    control = worth(Joint)
    print(f"{both / adaptive:.3f} of adaptive K, {control / adaptive:.3f} of it in the control")
    assert both >= 0.95 * adaptive > control


def test_a_kind_of_step_that_was_never_run_may_well_be_cheap():
    """So it is tried; and what was run often is hardly cheaper than it was."""
    measured_costs = Costs()
    assert measured_costs.of(1, CONTEXT).hopeful_seconds((0, 1)) > 0
    for verified, measured in ((0, 0.010), (8, 0.030)):
        for _ in range(1000):
            measured_costs.record(4, CONTEXT, 0, measured, verified)
    load = measured_costs.of(4, CONTEXT)
    assert load.hopeful_seconds((0, 4)) < 0.6 * load.seconds((0, 4))
    assert load.hopeful_seconds((0, 8)) == pytest.approx(0.030, rel=0.05)
