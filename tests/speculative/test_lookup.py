"""Chains that are looked up beside those of the MTP layer: what is emitted is plain greedy
decoding, each chain is what its source drafts, and the MTP layer's cache is whole when it drafts.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle

import pytest
import torch
import toy_models
from lookup_oracle import searched
from toy_models import (
    DRAFTS,
    MAX_CONTEXT_LEN,
    GreedySampling,
    ToyModels,
    adversarial,
    decode_greedily,
    fold,
    make_prompts,
    perfect,
    states_of,
)

from sglang_ascend.speculative.lengths import lengthened
from sglang_ascend.speculative.lookup.choice import prior_cost
from sglang_ascend.speculative.lookup.drafts import MAX_MATCH, MIN_MATCH, LookupDrafts
from sglang_ascend.speculative.lookup.phases import LookupPhases
from sglang_ascend.speculative.skipped import SkippedRows
from sglang_ascend.speculative.step import LaunchedPhases, StepConstants, speculative_step

OF_MTP, MOST = 3, 8
# Drafts of the MTP layer, step by step.
CHANGING = (3, 0, 0, 1, 3, 0, 2, 2, 0)
# The text of a model with as few states repeats itself, and that of the other does not.
FEW_STATES, MANY_STATES = 13, toy_models.NUM_STATES


@pytest.fixture(params=[FEW_STATES, MANY_STATES])
def num_states(request, monkeypatch) -> int:
    monkeypatch.setattr(toy_models, "NUM_STATES", request.param)
    return request.param


class Always(LookupDrafts):
    """Takes the lookup wherever it finds anything."""

    def _rates(self, rows, places):
        return 0.9 * (places > 0)


class Server:
    """A batch of toy models, with the steps' sources written down."""

    def __init__(
        self,
        prompts: list[list[int]],
        predict,
        drafts=LookupDrafts,
        schedule=(OF_MTP,),
        ends=False,
        batch_size_of_cost=1,
    ) -> None:
        """``ends``: chains of the MTP layer end behind their first draft."""
        self.schedule, self.cost = cycle(schedule), prior_cost(batch_size_of_cost)
        self.is_unlikely = (lambda likelihood: True) if ends else None
        self.models = models = ToyModels(prompts, OF_MTP, predict)
        self.constants = [StepConstants(k, len(prompts), "cpu") for k in range(MOST + 1)]
        self.skipped = SkippedRows(models.req_to_token.numel(), 1, torch.float64, "cpu")
        self.drafts = drafts(len(models.req_to_token), MAX_CONTEXT_LEN, MOST)
        for row, prompt in zip(models.rows.tolist(), prompts, strict=True):
            self.drafts.restart(row, prompt)
        self.drafts.begin_chains(models.rows)
        self.were_lookups: list[bool] = []

    def step(self) -> None:
        models, num_drafts = self.models, next(self.schedule)
        width = max(models.candidates.shape[1], num_drafts + 1)
        models.candidates = lengthened(models.candidates, width)
        launched = LaunchedPhases(
            models,
            models.propose,
            self.constants[width - 1],
            num_drafts,
            self.skipped,
            self.is_unlikely,
        )
        if self.is_unlikely is not None:
            num_drafts = min(num_drafts, 1)
        requests = models.begin_step()
        requests = replace(requests, max_kv_len=int(requests.seq_lens.max()) + 2 * MOST)
        phases = LookupPhases(launched, self.drafts, self.cost)
        sampling = GreedySampling()
        result = speculative_step(models.candidates, requests, phases, sampling, models.publish)
        models.end_step()
        is_lookup = self.drafts.is_lookup[models.rows].tolist()
        for request, tokens in enumerate(models.committed):
            num_kept = int(result.accept_lens[request])
            truth = decode_greedily(tokens, num_kept + 1)
            assert result.sampled[request, :num_kept].tolist() == truth[len(tokens) + 1 :]
            tokens += truth[len(tokens) : -1]
            chain = result.candidates[request]
            self.check_chain(request, truth, chain, is_lookup[request], num_drafts)
            if num_drafts > 0 and not all(is_lookup):
                self.check_cache(request, truth)
        assert ("extend" in models.calls) == (num_drafts > 0 and not all(is_lookup))
        self.were_lookups += is_lookup
        models.candidates = result.candidates

    def check_chain(
        self,
        request: int,
        known: list[int],
        candidates: torch.Tensor,
        is_lookup: bool,
        num_drafts: int,
    ) -> None:
        last, *chain = candidates.tolist()
        length = int(self.drafts.lengths[self.models.rows[request]])
        assert last == known[-1]
        found, matched = searched(known, length, MIN_MATCH, MAX_MATCH)
        assert is_lookup <= (matched > 0)
        if isinstance(self.drafts, Always):
            assert is_lookup == (matched > 0)
        if not is_lookup:
            assert length == num_drafts
            found = self.models.chain_after(fold(states_of(known[:-1])[-1], known[-1]))[:length]
        assert chain[:length] == found

    def check_cache(self, request: int, known: list[int]) -> None:
        for position, state in enumerate(states_of(known[:-1])):
            expected = (state, known[position + 1])
            assert self.models.mtp_cache[self.models.slot(request, position)] == expected


@pytest.mark.parametrize("predict", DRAFTS)
@pytest.mark.parametrize("batch_size", [1, 2, 7])
@pytest.mark.parametrize("schedule", [(OF_MTP,), CHANGING])
def test_what_is_emitted_is_plain_greedy_decoding_and_each_chain_is_its_source_s(
    num_states, batch_size, predict, schedule
):
    prompts = make_prompts(batch_size)
    server = Server(prompts, predict, schedule=schedule)
    while max(map(len, server.models.committed)) < MAX_CONTEXT_LEN - 2 * MOST - 1:
        server.step()
    for prompt, tokens in zip(prompts, server.models.committed, strict=True):
        assert tokens == decode_greedily(prompt, len(tokens) - len(prompt))


def shares(predict, num_steps: int = 7) -> list[bool]:
    server = Server(make_prompts(1), predict)
    for _ in range(num_steps):
        server.step()
    return server.were_lookups


def test_the_better_source_is_taken(monkeypatch):
    """The control of the test above: both sources take part in it."""
    monkeypatch.setattr(toy_models, "NUM_STATES", FEW_STATES)
    assert all(shares(adversarial)[-3:]), "lookups are right, the MTP layer never is"
    monkeypatch.setattr(toy_models, "NUM_STATES", MANY_STATES)
    assert not any(shares(perfect, 12)[-3:]), "the MTP layer is right, lookups are not"


@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.parametrize("ends", [True, False])
def test_lookups_are_as_short_as_chains_that_end_early(monkeypatch, batch_size, ends):
    """Where one more row of each request is dear, and as long as K where none ends early."""
    monkeypatch.setattr(toy_models, "NUM_STATES", FEW_STATES)
    server = Server(make_prompts(batch_size), perfect, ends=ends, batch_size_of_cost=64)
    for _ in range(40 if ends else 0):
        server.drafts.were_drafted(server.models.rows, 1)
    lengths = set()
    while max(map(len, server.models.committed)) < MAX_CONTEXT_LEN - 2 * MOST - 1:
        server.step()
        rows = server.models.rows
        lengths |= set(server.drafts.lengths[rows][server.drafts.is_lookup[rows]].tolist())
    assert lengths
    assert (min(lengths) < OF_MTP) == ends, lengths


class BehindByOne(Always):
    def accept(self, rows, last_tokens, sampled, accept_lens):
        super().accept(rows, last_tokens, sampled, accept_lens)
        self.tokens[rows] = self.tokens[rows].roll(1, 1)


class OneTokenShort(Always):
    def restart(self, row, known):
        super().restart(row, known[:-1] if len(known) > 1 else known)


@pytest.mark.parametrize(
    ("drafts", "is_wrong"), [(Always, False), (BehindByOne, True), (OneTokenShort, True)]
)
def test_a_history_that_is_off_by_one_is_found(num_states, drafts, is_wrong):
    server = Server(make_prompts(7), adversarial, drafts)
    with pytest.raises(AssertionError) if is_wrong else nullcontext():
        for _ in range(6):
            server.step()


def test_a_request_that_begins_again_knows_what_it_emitted_and_nothing_of_its_row():
    drafts = LookupDrafts(3, 40, MOST)
    rows, asked = torch.tensor([2]), (OF_MTP, prior_cost(1))
    drafts.restart(2, [9, 9, 9, 9, 9, 9])
    for known in ([1, 2, 3, 4, 1], [1, 2, 3, 4, 1, 2, 3, 7, 1]):
        drafts.restart(2, known)
        drafts.begin_chains(rows)
        # The last token of a prompt is followed by the one that its prefill gave.
        drafts.accept(rows, torch.tensor([2]), torch.tensor([[5, 3, 3, 3]]), torch.tensor([1]))
        found = drafts.propose(rows, *asked)
        _, matched = searched([*known, 2, 5], MOST, MIN_MATCH, MAX_MATCH)
        assert bool(found.is_chosen) <= bool(matched)
        drafts.extend(rows, torch.tensor([3]))
    assert (
        drafts.propose(rows, *asked).drafts[0].tolist()
        == searched([*known, 2, 3, 3], MOST, MIN_MATCH, MAX_MATCH)[0]
    )
