"""A batch that is made up to another rank's size takes the very same step, and rows of no request
touch nobody's slots only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_step import check_step
from toy_models import DRAFTS, ToyModels, make_prompts, mixed

from sglang_ascend.speculative.padded import PaddedPhases


@pytest.mark.parametrize("predict", DRAFTS)
@pytest.mark.parametrize(("batch_size", "size"), [(1, 2), (3, 3), (3, 4), (1, 7), (6, 7)])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_padded_step_is_the_step(num_steps, batch_size, size, predict):
    models = ToyModels(make_prompts(batch_size), num_steps, predict)
    for _ in range(9):
        check_step(models, PaddedPhases(models.phases(), size))


class StandsInTheFirstRequestsRow(PaddedPhases):
    def prepare(self, candidates, requests):
        positions = super().prepare(candidates, requests)
        inputs = self.phases.inputs
        width = candidates.shape[1]
        inputs.row_slots[len(candidates) * width :] = inputs.row_slots[:width]
        return positions


def test_a_row_of_no_request_in_a_requests_slots_would_be_seen():
    models = ToyModels(make_prompts(3), 3, mixed)
    with pytest.raises((AssertionError, KeyError, IndexError, RuntimeError)):
        for _ in range(6):
            check_step(models, StandsInTheFirstRequestsRow(models.phases(), 4))


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_rank_without_requests_enters_as_many_forwards(num_steps):
    """Of as many rows, the head's included; it has nothing to give afterwards."""
    entered = {}
    for requests in (0, 2):
        models = ToyModels(make_prompts(2), num_steps, mixed)
        given = models.begin_step()
        given = replace(
            given,
            seq_lens=given.seq_lens[:requests],
            req_pool_indices=given.req_pool_indices[:requests],
            max_kv_len=given.max_kv_len if requests else 0,
        )
        forwards = CountedForwards(models)
        phases = models.phases()
        phases.forwards = forwards
        phases = PaddedPhases(phases, 2)
        candidates = models.candidates[:requests]
        phases.prepare(candidates, given)
        assert len(phases.verify()) == requests * (num_steps + 1)
        lens = torch.ones(requests, dtype=torch.int32)
        drafted = phases.draft(candidates, lens, given.seq_lens + lens)
        assert drafted.shape == candidates.shape
        entered[requests] = forwards.entered
    rows = 2 * (num_steps + 1)
    assert entered[0] == entered[2] == [(rows, rows), (rows, 2)] + [(2, 2)] * (num_steps - 1)


class CountedForwards:
    """Of toy models: the rows of each forward, and those that the head is asked for."""

    def __init__(self, models: ToyModels) -> None:
        self.models, self.entered = models, []

    def target(self, rows, tokens, requests):
        self.entered.append((len(tokens), len(tokens)))
        return torch.zeros(len(tokens), 11), tokens

    def mtp(self, rows, tokens, hidden, last_rows=None):
        count = len(tokens) if last_rows is None else len(last_rows)
        self.entered.append((len(tokens), count))
        return torch.zeros(count, 11), torch.zeros(count, dtype=torch.int64)
