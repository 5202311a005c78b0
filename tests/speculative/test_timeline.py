"""A step's phases follow each other without a gap, add up to the step, and change nothing in it.

The models and the clock are toys: each call takes a time that is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from toy_models import GreedySampling, ToyModels, make_prompts, mixed

from sglang_ascend.speculative import step as step_module
from sglang_ascend.speculative.step import StepResult, speculative_step
from sglang_ascend.speculative.timeline import PHASES, HostClock, StepTimeline, StepTimes

PREPARE, TARGET, DRAW, PUBLISH, MTP, RESULT = (2.0**i for i in range(6))


class ToyClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def mark(self) -> float:
        return self.now

    def seconds(self, marks: Sequence[float]) -> Sequence[float]:
        return marks

    def taking(self, seconds: float, function):
        def timed(*args):
            self.now += seconds
            return function(*args)

        return timed


class ClockedModels(ToyModels):
    """Toy models whose every call takes its time."""

    def __init__(self, clock: ToyClock, num_steps: int) -> None:
        super().__init__(make_prompts(3), num_steps, mixed)
        self.clock = clock
        for name, seconds in {"target": TARGET, "mtp": MTP, "publish": PUBLISH}.items():
            setattr(self, name, clock.taking(seconds, getattr(self, name)))

    def sampling(self) -> GreedySampling:
        sampling = GreedySampling()
        sampling.draw = self.clock.taking(DRAW, sampling.draw)
        return sampling


def run_step(models: ToyModels, timeline: StepTimeline | None) -> StepResult:
    """As the worker runs it."""
    requests, phases = models.begin_step(), models.phases()
    result = speculative_step(
        models.candidates,
        requests,
        phases if timeline is None else timeline.begin(phases),
        models.sampling() if isinstance(models, ClockedModels) else GreedySampling(),
        models.publish,
    )
    models.end_step()
    return result


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_each_phase_has_the_time_of_its_calls(monkeypatch, num_steps):
    clock, seen = ToyClock(), []
    prepare = clock.taking(PREPARE, step_module.chain.prepare_step)
    monkeypatch.setattr(step_module.chain, "prepare_step", prepare)
    timeline = StepTimeline([seen.append], clock)
    run_step(ClockedModels(clock, num_steps), timeline)
    clock.now += RESULT
    timeline.finish(batch_size=3)
    (step,) = seen
    assert step.batch_size == 3
    assert step.durations == {
        "prepare": PREPARE,
        "target": TARGET,
        "verify": DRAW + PUBLISH,
        "draft": num_steps * MTP,
        "result": RESULT,
    }
    assert list(step.durations) == list(PHASES)
    assert (step.moments[0], step.moments[-1]) == (1000.0, clock.now)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_timed_step_is_the_step(num_steps):
    plain = run_step(ToyModels(make_prompts(3), num_steps, mixed), None)
    seen: list[StepTimes] = []
    timeline = StepTimeline([seen.append], HostClock())
    models = ToyModels(make_prompts(3), num_steps, mixed)
    timed = run_step(models, timeline)
    timeline.finish(3)
    assert all(torch.equal(getattr(plain, name), getattr(timed, name)) for name in vars(plain))
    assert models.calls == ["target", "publish", "extend", *["decode"] * (num_steps - 1)]
    assert all(seconds >= 0 for seconds in seen[0].durations.values())


def test_a_step_that_raises_leaves_the_next_one_whole():
    clock, seen = ToyClock(), []
    timeline = StepTimeline([seen.append], clock)
    timeline.begin(ClockedModels(clock, 2).phases())
    clock.now += 500
    run_step(ClockedModels(clock, 2), timeline)
    timeline.finish(3)
    assert seen[0].moments[0] == 1500.0


class LateClock(ToyClock):
    """A device's: its marks are events, and nobody knows their times before they have happened."""

    def __init__(self) -> None:
        super().__init__()
        self.happened_until = 0.0

    def seconds(self, marks: Sequence[float]) -> Sequence[float] | None:
        return marks if marks[-1] <= self.happened_until else None


def test_marks_that_are_not_known_yet_are_read_later_and_in_order():
    clock, seen = LateClock(), []
    timeline = StepTimeline([seen.append], clock)

    def step(batch_size: int) -> None:
        run_step(ClockedModels(clock, 2), timeline)
        timeline.finish(batch_size)

    step(1)
    end_of_first = clock.now
    step(2)
    assert seen == []
    clock.happened_until = end_of_first
    step(3)
    assert [times.batch_size for times in seen] == [1]
    clock.happened_until = float("inf")
    step(4)
    assert [times.batch_size for times in seen] == [1, 2, 3, 4]
    assert all(a.moments[-1] <= b.moments[0] for a, b in pairwise(seen))
