"""A captured step is the step: every emitted token and every cache slot is what the launched step
leaves. The graphs are a fake device's, which runs again what it recorded, on what the buffers hold.

A replayed step reads its batch's rows and no other's: what a larger batch left is a request without
tokens in row 0, which nobody owns. (Real capture on a stream runs in tests/npu_emulation.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_step import check_step
from toy_models import DRAFTS, PROMPT_LENGTHS, ToyModels, make_prompts, mixed

from sglang_ascend.speculative.captured import (
    CapturedPhases,
    CapturedSteps,
    StepBuffers,
    capture_phases,
)
from sglang_ascend.speculative.forwards import Requests


class FakeGraph:
    """Runs its function again, and leaves the results where the first run left them."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run, self.result = run, run()

    def replay(self) -> None:
        again = self.run()
        if isinstance(again, torch.Tensor):
            again, kept = (again,), (self.result,)
        else:
            kept = self.result
        for old, new in zip(kept, again, strict=True):
            old.copy_(new)


def record(run: Callable[[], Any]) -> tuple[FakeGraph, Any]:
    graph = FakeGraph(run)
    return graph, graph.result


def captured(
    models: ToyModels, size: int, kind: type[CapturedPhases] = CapturedPhases
) -> CapturedPhases:
    """The step of toy models on graphs of ``size`` requests."""
    buffers = StepBuffers(len(PROMPT_LENGTHS), models.num_steps + 1, "cpu")
    requests = buffers.requests(size, models.req_to_token, page_size=1)
    phases = capture_phases(models.phases(), buffers, requests, record, lambda: None)
    return kind(**vars(phases))


@pytest.mark.parametrize("predict", DRAFTS)
@pytest.mark.parametrize(("batch_size", "size"), [(1, 1), (3, 3), (3, 4), (1, 7), (7, 7)])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_replayed_step_is_the_step(num_steps, batch_size, size, predict):
    models = ToyModels(make_prompts(batch_size), num_steps, predict)
    phases = captured(models, size)
    for _ in range(9):
        check_step(models, phases)


class LengthsOfTheFirstStep(CapturedPhases):
    """Lengths are written once, while the requests stay the same."""

    def prepare(self, candidates, requests):
        first = self.buffers.seq_lens.clone()
        positions = super().prepare(candidates, requests)
        if first.any():
            self.buffers.seq_lens.copy_(first)
        return positions


class DraftsBehindTheLastStepsTokens(CapturedPhases):
    """What was sampled reaches the second graph a step late."""

    def draft(self, sampled, accept_lens, new_seq_lens):
        self.draft_graph.replay()
        drafted = self.next_candidates[: len(sampled)].clone()
        super().draft(sampled, accept_lens, new_seq_lens)
        return drafted


class NotVerifiedAgain(CapturedPhases):
    """The first graph is not replayed."""

    def verify(self):
        return self.logits[: self.buffers.num_rows]


@pytest.mark.parametrize(
    "mistaken", [LengthsOfTheFirstStep, DraftsBehindTheLastStepsTokens, NotVerifiedAgain]
)
def test_a_mistake_in_the_replay_would_be_seen(mistaken):
    models = ToyModels(make_prompts(3), 3, mixed)
    phases = captured(models, 4, mistaken)
    with pytest.raises((AssertionError, KeyError, IndexError, RuntimeError)):
        for _ in range(6):
            check_step(models, phases)


def requests_of(lengths: list[int]) -> Requests:
    count = len(lengths)
    return Requests(
        seq_lens=torch.tensor(lengths),
        req_pool_indices=torch.arange(1, count + 1, dtype=torch.int32),
        req_to_token=torch.zeros(9, 40, dtype=torch.int32),
        max_kv_len=40,
    )


@pytest.fixture
def buffers() -> StepBuffers:
    return StepBuffers(max_batch_size=8, width=4, device="cpu")


def fill(buffers: StepBuffers, lengths: list[int]) -> tuple[torch.Tensor, Requests]:
    candidates = torch.randint(10, (len(lengths), 4))
    requests = requests_of(lengths)
    buffers.fill(candidates, requests)
    return candidates, requests


@pytest.mark.parametrize("sizes", [(8, 3), (3, 8, 1), (5, 5), (2, 4, 3, 1)])
def test_rows_of_no_request_are_row_0_without_tokens(buffers, sizes):
    for size in sizes:
        candidates, requests = fill(buffers, [10 + i for i in range(size)])
        assert torch.equal(buffers.candidates[:size], candidates)
        assert torch.equal(buffers.seq_lens[:size], requests.seq_lens)
        assert buffers.req_pool_indices[:size].tolist() == list(range(1, size + 1))
        assert not buffers.seq_lens[size:].any() and not buffers.req_pool_indices[size:].any()
        assert buffers.num_rows == 4 * size


def test_rows_that_were_left_would_be_seen(buffers):
    """The control: a batch that does not say how many rows were filled before it."""
    fill(buffers, [10] * 8)
    buffers._num_filled = 0
    fill(buffers, [10] * 3)
    assert buffers.req_pool_indices[3:].any()


def test_a_batch_is_replayed_on_the_smallest_graph_of_its_k_that_holds_it():
    steps = CapturedSteps({k: {size: f"{k} for {size}" for size in (4, 1, 2)} for k in (3, 0)})
    found = [steps.that_holds(size, 3) for size in (1, 2, 3, 4, 5)]
    assert found == ["3 for 1", "3 for 2", "3 for 4", "3 for 4", None]
    assert steps.that_holds(3, 0) == "0 for 4"
