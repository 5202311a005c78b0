"""What pauses of the machine, and jumps of its speed, say of the costs of two K: nothing, unless
they come again."""

from __future__ import annotations

import math

import pytest

from sglang_ascend.speculative.adaptive.costs.every_load import Costs
from sglang_ascend.speculative.adaptive.costs.run import Run

Steps = list[tuple[int, float]]  # K, and seconds
BOTH: Steps = [(2, 1.0)] * 30 + [(3, 1.0)] * 30
NOISY: Steps = [(2, 1.0), (2, 1.1)] * 15 + [(3, 1.0), (3, 1.1)] * 15


def ratio(steps: Steps) -> float:
    """Of the cost of K = 3 to that of K = 2, as it is believed behind these steps."""
    costs = Costs()
    for drafts, seconds in steps:
        costs.record(1, 100.0, drafts, seconds)
    load = costs.of(1, 100.0)
    return load.seconds((3, 3)) / load.seconds((2, 2))


def doubt_every_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_doubtful", lambda run, innovation: innovation)


def doubt_what_becomes_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_doubtful", lambda run, innovation: min(0.0, innovation))


def trust_every_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run finds the machine as the last one left it."""
    monkeypatch.setattr(Run, "is_quiet", True)


def doubt_no_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_doubtful", lambda run, innovation: 0.0)


@pytest.mark.parametrize(
    ("steps", "controls", "off"),
    [
        pytest.param(
            [*BOTH, *[(3, 4.0)] * 3, *[(2, 1.0)] * 12],
            [doubt_every_jump, trust_every_end],
            1.5,
            id="amid steps of one K, and over as the other comes",
        ),
        pytest.param(
            [*NOISY, *[(3, 4.0)] * 3, *[(3, 1.0)] * 6, *[(2, 1.2)] * 6],
            [doubt_what_becomes_faster],
            1.15,
            id="amid steps of one K, which goes on",
        ),
        pytest.param(
            [*BOTH, *[(2, 4.0)] * 6, *[(3, 1.0)] * 12],
            [doubt_every_jump],
            1.5,
            id="for as long as a K runs",
        ),
        pytest.param(
            [*[(2, 1.0)] * 30, *[(2, 4.0)] * 4, *[(3, 1.0)] * 6],
            [trust_every_end],
            1.5,
            id="over as a K comes for the first time",
        ),
    ],
)
def test_a_pause_is_not_the_cost_of_a_k(monkeypatch, steps: Steps, controls, off: float):
    """With ``controls`` the ratio is believed to be off by so much at least."""
    assert ratio(steps) == pytest.approx(1, abs=0.1)
    for control in controls:
        control(monkeypatch)
    assert abs(math.log(ratio(steps))) > math.log(off)


@pytest.mark.parametrize(
    ("steps", "true"),
    [
        pytest.param([*BOTH, *([(2, 1.0)] * 6 + [(3, 4.0)] * 6) * 3], 4.0, id="a K became dearer"),
        pytest.param([*BOTH, *([(2, 1.0)] * 6 + [(3, 0.25)] * 6) * 3], 0.25, id="or cheaper"),
        pytest.param(
            [*[(2, 4.0)] * 30, *[(3, 16.0)] * 30, *[(2, 1.0)] * 30, *[(3, 1.0)] * 12],
            1.0,
            id="all was learnt on a machine that was slower",
        ),
    ],
)
def test_a_cost_that_has_changed_is_learnt(monkeypatch, steps: Steps, true: float):
    assert ratio(steps) == pytest.approx(true, rel=0.05)
    doubt_no_jump(monkeypatch)
    assert abs(math.log(ratio(steps) / true)) > 1
