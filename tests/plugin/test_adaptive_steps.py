"""What adaptive drafting is told of a server's steps: each one's own time, known when it may be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]

SCHEDULE = [3, 3, 3, 1, 1, 0, 0, 2, 2]
SECONDS = {0: 0.01, 1: 0.02, 2: 0.04, 3: 0.08}


class DeviceClock:
    """The host launches a step in no time; its device does one behind the other."""

    def __init__(self) -> None:
        self.launched, self.done = 0.0, 0.0

    def mark(self) -> float:
        return self.launched

    def seconds(self, marks):
        return marks if marks[-1] <= self.done else None


class Request(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.fixture
def batch():
    reqs = [
        Request(kv=SimpleNamespace(kv_committed_len=9), sampling_params=SimpleNamespace(top_k=1))
    ]
    return SimpleNamespace(reqs=reqs)


@pytest.mark.parametrize("steps_behind", [0, 1, 4])
def test_each_step_is_told_by_its_own_time(batch, monkeypatch, steps_behind):
    from sglang_ascend.plugin.mtp.adaptive import steps as adaptive_steps

    monkeypatch.setattr(adaptive_steps, "decision_of_first_rank", lambda *numbers: numbers)
    clock, told, chosen = DeviceClock(), [], iter(SCHEDULE)
    adaptive = adaptive_steps.AdaptiveSteps(3, None, clock=clock)
    adaptive.policy.choose = lambda *args: next(chosen)
    adaptive.policy.record_time = lambda *step: told.append(step[2:4])
    ends = [0.0]
    for k in SCHEDULE:
        adaptive.begin(batch)
        clock.launched += SECONDS[k]
        ends.append(clock.launched)
        clock.done = ends[max(0, len(ends) - 1 - steps_behind)]
    before = [3, *SCHEDULE]
    # A step that verified a chain of another K says nothing; nor does the last, which has no next.
    same = [k for k, last in zip(SCHEDULE[:-1], before, strict=False) if k == last]
    assert [k for k, _ in told] == same[: len(told)] and len(same) - len(told) <= steps_behind
    assert told
    for k, seconds in told:
        assert seconds == pytest.approx(SECONDS[k])


def test_the_gauge_has_the_drafts_of_every_step_and_is_told_changes_alone(batch, monkeypatch):
    from sglang_ascend.plugin.mtp.adaptive import steps as adaptive_steps

    monkeypatch.setattr(adaptive_steps, "decision_of_first_rank", lambda *numbers: numbers)
    told = []
    adaptive = adaptive_steps.AdaptiveSteps(3, None, DeviceClock(), on_change=told.append)
    adaptive.policy.record_time = lambda *step: None
    assert told == [3]
    chosen = [3, 1, 1, 0, 2, 2]
    adaptive.policy.choose = lambda *args: chosen[len(drafted)]
    drafted = []
    for k in chosen:
        # Of a batch whose chains are all of its prompts', as many were drafted as is told there.
        adaptive.behind_prompts[batch.reqs[0]] = k
        drafted.append(adaptive.begin(batch)[1])
        assert told[-1] == k
    assert drafted == chosen and told == [3, 1, 0, 2]


def test_rows_that_do_not_fit_are_one_sentence(monkeypatch):
    from sglang_ascend.plugin.errors import StartupRefused
    from sglang_ascend.plugin.mtp.adaptive import skipped_rows

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("NPU out of memory. Tried to allocate 7.00 GiB")

    monkeypatch.setattr(skipped_rows, "SkippedRows", out_of_memory)
    runner = SimpleNamespace(
        max_total_num_tokens=4096,
        page_size=128,
        model_config=SimpleNamespace(spec_hidden_size=7168),
        dtype=torch.bfloat16,
        device="npu",
    )
    with pytest.raises(StartupRefused, match=r"4224 KV slots.*--mem-fraction-static"):
        skipped_rows.make_skipped(SimpleNamespace(model_runner=runner), False)
