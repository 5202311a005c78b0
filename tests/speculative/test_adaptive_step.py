"""The step while K changes from step to step, 0 included: what is emitted is plain greedy decoding,
and whenever something is drafted the MTP layer's cache and its chain are those of a K that stays.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from toy_models import (
    DRAFTS,
    GreedySampling,
    ToyModels,
    decode_greedily,
    fold,
    make_prompts,
    mixed,
    states_of,
)

from sglang_ascend.speculative.skipped import SkippedRows, slots_of_pages
from sglang_ascend.speculative.skipped import rows as skipped_rows
from sglang_ascend.speculative.skipped.catch_up import catch_up
from sglang_ascend.speculative.step import LaunchedPhases, StepConstants, speculative_step

MAX_DRAFTS = 3
SCHEDULES = {
    "off and on": [3, 0, 0, 0, 3, 3, 0, 1, 2],
    "up and down": [3, 2, 1, 0, 1, 2, 3],
    "never": [0] * 8,
    "random": random.Random(5).choices(range(MAX_DRAFTS + 1), k=14),
    "mostly off": [*random.Random(6).choices([0, 0, 0, 3], k=14), 2],
}


def skipped_of(models: ToyModels) -> SkippedRows:
    num_slots = models.req_to_token.numel()
    return SkippedRows(num_slots, 1, torch.float64, "cpu")


class Server:
    """A batch of toy models whose K is told step by step."""

    def __init__(self, prompts: list[list[int]], predict, skipped=skipped_of) -> None:
        self.models = ToyModels(prompts, MAX_DRAFTS, predict)
        self.skipped = skipped(self.models)
        size = len(prompts)
        self.constants = [StepConstants(k, size, "cpu") for k in range(MAX_DRAFTS + 1)]
        self.in_chains = MAX_DRAFTS

    def step(self, drafted: int) -> None:
        models, verified = self.models, max(self.in_chains, drafted)
        candidates = models.candidates
        missing = verified + 1 - candidates.shape[1]
        candidates = torch.cat([candidates, candidates[:, -1:].expand(-1, missing)], dim=1)
        constants = self.constants[verified]
        phases = LaunchedPhases(models, models.propose, constants, drafted, self.skipped)
        result = speculative_step(
            candidates, models.begin_step(), phases, GreedySampling(), models.publish
        )
        models.end_step()
        assert result.sampled.shape[1] == verified + 1
        assert result.candidates.shape[1] == drafted + 1
        for request, tokens in enumerate(models.committed):
            num_kept = int(result.accept_lens[request])
            truth = decode_greedily(tokens, num_kept + 1)
            assert result.sampled[request, :num_kept].tolist() == truth[len(tokens) + 1 :]
            tokens += truth[len(tokens) : -1]
            states = states_of(tokens)
            chain = models.chain_after(fold(states[-1], truth[-1]))[:drafted]
            assert result.candidates[request].tolist() == [truth[-1], *chain]
            for position, state in enumerate(states if drafted else ()):
                expected = (state, truth[position + 1])
                assert models.mtp_cache[models.slot(request, position)] == expected
        models.candidates, self.in_chains = result.candidates, drafted


@pytest.mark.parametrize("predict", DRAFTS)
@pytest.mark.parametrize("batch_size", [1, 2, 7])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_any_schedule_emits_plain_greedy_decoding_and_drafts_from_a_whole_cache(
    schedule, batch_size, predict
):
    prompts = make_prompts(batch_size)
    server = Server(prompts, predict)
    for drafted in schedule:
        server.step(drafted)
    for prompt, tokens in zip(prompts, server.models.committed, strict=True):
        assert tokens == decode_greedily(prompt, len(tokens) - len(prompt))


def test_without_drafts_a_step_is_one_row_of_the_target_and_no_mtp_layer():
    server = Server(make_prompts(4), mixed)
    for before, drafted in pairwise([MAX_DRAFTS, 0, 0, 0]):
        server.step(drafted)
        assert server.models.calls == ["target", "publish"]
        assert len(server.models.target_written) == 4 * (before + 1)
        assert not server.models.mtp_written


def test_what_was_skipped_is_caught_up_once():
    server = Server(make_prompts(4), mixed)
    for drafted in [0, 0, 0, 0, 3]:
        server.step(drafted)
    assert server.models.calls.count("extend") == 2
    server.step(3)
    assert server.models.calls.count("extend") == 1


class NotCaughtUp(SkippedRows):
    def catch_up(self, slot_table, lens, run):
        pass


class ShiftedTokens(SkippedRows):
    """Pairs a hidden state with its own token's successor's successor."""

    def keep(self, slots, hidden, next_tokens):
        super().keep(slots, hidden, next_tokens.roll(1))


@pytest.mark.parametrize("mistaken", [NotCaughtUp, ShiftedTokens])
def test_a_mistake_in_catching_up_would_be_seen(mistaken):
    def broken(models: ToyModels) -> SkippedRows:
        return mistaken(models.req_to_token.numel(), 1, torch.float64, "cpu")

    server = Server(make_prompts(4), mixed, broken)
    with pytest.raises((AssertionError, KeyError)):
        for drafted in SCHEDULES["off and on"]:
            server.step(drafted)


def test_a_slot_that_is_written_again_is_not_skipped_any_more():
    skipped = SkippedRows(8, 1, torch.float64, "cpu")
    slots = torch.tensor([[5, 2, 7], [5, 3, 0]])
    skipped.keep(torch.tensor([5, 2, 3]), torch.zeros(3, 1).double(), torch.zeros(3).long())
    lens = torch.tensor([2, 1])
    assert skipped.slots_of(slots, lens).tolist() == [[0, 0], [0, 1], [1, 0]]
    skipped.forget(torch.tensor([5]))
    assert skipped.slots_of(slots, lens).tolist() == [[0, 1]]


def test_requests_that_skipped_nothing_run_nothing():
    skipped, calls = SkippedRows(8, 1, torch.float64, "cpu"), []
    skipped.keep(torch.tensor([5]), torch.zeros(1, 1).double(), torch.zeros(1).long())
    skipped.catch_up(torch.tensor([[1, 2]]), torch.tensor([2]), lambda *rows: calls.append(rows))
    assert calls == []


class Recorded:
    """``Forwards`` that writes down what it is asked to fill."""

    def __init__(self) -> None:
        self.filled = []

    def mtp(self, rows, tokens, hidden, last_rows):
        self.filled.append((rows, tokens.tolist()))


@pytest.mark.parametrize("rows_depend", [False, True])
def test_rows_of_several_layers_are_caught_up_behind_all_before_them(rows_depend):
    skipped = SkippedRows(16, 0, torch.float64, "cpu", rows_depend=rows_depend)
    table = torch.tensor([[5, 2, 7, 1], [5, 2, 9, 4], [8, 3, 6, 0]])
    skipped.keep(torch.tensor([7, 1, 4]), None, torch.tensor([70, 10, 40]))
    forwards = Recorded()
    catch_up(skipped, forwards, table, torch.tensor([3, 4, 2]))
    ((rows, tokens),) = forwards.filled
    assert (rows.slots.tolist(), rows.positions.tolist(), tokens) == ([7, 4], [2, 3], [70, 40])
    seen = rows.metadata.kv_lens.tolist(), rows.metadata.block_table.tolist()
    if rows_depend:
        assert (rows.metadata.query_len, rows.metadata.ragged_query_lens) == (None, (1, 1))
        assert rows.metadata.ragged_kv_lens == (3, 4)
        assert seen == ([3, 4], [[5, 2, 7, 1], [5, 2, 9, 4]])
    else:
        assert rows.metadata.query_len == 1 and seen == ([1, 1], [[7], [4]])
    assert (skipped.next_tokens >= 0).nonzero()[:, 0].tolist() == [1], "behind what is asked for"


def test_slots_that_requests_share_are_caught_up_in_every_forward_that_they_are_in(monkeypatch):
    monkeypatch.setattr(skipped_rows, "MAX_ROWS", 2)
    skipped = SkippedRows(8, 0, torch.float64, "cpu")
    skipped.keep(torch.tensor([5, 2, 7]), None, torch.tensor([50, 20, 70]))
    forwards = Recorded()
    catch_up(skipped, forwards, torch.tensor([[5, 2, 0], [5, 2, 7]]), torch.tensor([2, 3]))
    filled = [(rows.slots.tolist(), tokens) for rows, tokens in forwards.filled]
    assert filled == [([5, 2], [50, 20]), ([5, 2], [50, 20]), ([7], [70])]
    assert not (skipped.next_tokens >= 0).any()


def test_slots_of_pages_are_those_of_every_position():
    assert slots_of_pages(torch.tensor([[2, 0]]), 3).tolist() == [[6, 7, 8, 0, 1, 2]]
