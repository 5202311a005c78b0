"""Chains that end where the MTP layer finds them unlikely: the rule, and steps that obey it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import scipy.special
import torch
from test_lookup_sampling import Rejection, SampledToys
from toy_models import (
    DRAFTS,
    VOCABULARY,
    GreedySampling,
    ToyModels,
    decode_greedily,
    fold,
    make_prompts,
    next_token,
    states_of,
)

from sglang_ascend.speculative.lengths import UnlikelyChains
from sglang_ascend.speculative.step import LaunchedPhases, StepConstants, speculative_step

MAX_DRAFTS = 4
# Of the likeliest token of the toy's drafts, whose logits are 1 and, for all others, 0.
P_LIKELIEST = np.e / (np.e + VOCABULARY - 1)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_chains_end_where_their_mean_probability_is_below_the_least(batch_size):
    generator = torch.Generator().manual_seed(batch_size)
    logits = 3 * torch.randn(8, batch_size, 50, generator=generator)
    probs = scipy.special.softmax(logits.double().numpy(), axis=-1).max(axis=-1)
    means = probs.cumprod(axis=0).mean(axis=1)
    for after, before in pairwise(means[::-1]):
        least = (before + after) / 2
        is_unlikely = UnlikelyChains(least)
        assert [is_unlikely(torch.tensor(row)) for row in probs] == (means < least).tolist()


def test_all_ranks_end_their_chains_where_the_first_does():
    told = []

    def agreed(is_unlikely):
        told.append(is_unlikely)
        return True

    assert UnlikelyChains(0.5, agreed)(torch.tensor([0.99]))
    assert told == [False]


class Server:
    """A batch of toy models whose chains end as ``is_unlikely()`` says."""

    def __init__(self, models, is_unlikely, make_sampling) -> None:
        self.models, self.is_unlikely, self.make_sampling = models, is_unlikely, make_sampling
        self.constants = [StepConstants(k, len(models.rows), "cpu") for k in range(MAX_DRAFTS + 1)]

    def step(self):
        models, sampling = self.models, self.make_sampling()
        num_drafts = models.candidates.shape[1] - 1
        propose = getattr(sampling, "propose", models.propose)
        phases = LaunchedPhases(
            models,
            propose,
            self.constants[num_drafts],
            MAX_DRAFTS,
            is_unlikely=self.is_unlikely(),
            drafting=self.constants[MAX_DRAFTS],
        )
        requests = models.begin_step()
        requests = replace(requests, max_kv_len=requests.max_kv_len + 2 * MAX_DRAFTS)
        result = speculative_step(models.candidates, requests, phases, sampling, models.publish)
        models.end_step()
        rows = zip(models.candidates[:, 0], result.sampled, result.accept_lens, strict=True)
        for tokens, (last, sampled, kept) in zip(models.committed, rows, strict=True):
            tokens += [int(last), *sampled[: kept - 1].tolist()]
        models.candidates = result.candidates
        return sampling


@pytest.mark.parametrize("predict", DRAFTS)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("num_kept", range(1, MAX_DRAFTS + 1))
def test_ended_chains_emit_plain_greedy_decoding(num_kept, batch_size, predict):
    prompts = make_prompts(batch_size)
    least = 1.1 * P_LIKELIEST**num_kept  # which the num_kept-th draft falls below
    models = ToyModels(prompts, MAX_DRAFTS, predict)
    server = Server(models, partial(UnlikelyChains, least), GreedySampling)
    for _ in range(6):
        server.step()
        assert models.candidates.shape[1] == num_kept + 1
        assert models.calls.count("decode") == num_kept - 1
    for prompt, tokens in zip(prompts, models.committed, strict=True):
        assert tokens == decode_greedily(prompt, len(tokens) - len(prompt))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("num_kept", range(1, MAX_DRAFTS + 1))
def test_a_chain_behind_a_prompt_ends_as_any_other(num_kept, batch_size):
    """Draft 1 is the prefill's, and its probability counts."""
    prompts = make_prompts(batch_size)
    models = ToyModels(prompts, MAX_DRAFTS, next_token)
    phases, requests = models.phases(), models.begin_step()
    phases.is_unlikely = UnlikelyChains(1.1 * P_LIKELIEST**num_kept)
    phases.prepare(models.candidates[:, :2], requests)
    states = [
        fold(states_of(prompt)[-1], int(row[0]))
        for prompt, row in zip(prompts, models.candidates, strict=True)
    ]
    hidden = torch.tensor(states, dtype=torch.float64)[:, None]
    completed = phases.complete(hidden, torch.full((batch_size,), P_LIKELIEST))
    assert torch.equal(completed, models.candidates[:, : num_kept + 1])


def every_draft_is_verified(server: Server) -> bool:
    sampling = server.step()
    return len(sampling.next_draft_probs) == server.models.candidates.shape[1] - 1


def rejecting(is_unlikely) -> Server:
    """Of a batch of one, whose chains end by what was drawn."""
    models = SampledToys(make_prompts(1), MAX_DRAFTS, next_token)
    generator = torch.Generator().manual_seed(0)
    drawn_from = torch.zeros(1, 0, VOCABULARY)
    return Server(models, is_unlikely, partial(Rejection, drawn_from, generator))


def test_no_draft_that_an_end_was_decided_by_is_hidden_from_verification(monkeypatch):
    """Under rejection sampling a draft that is dropped because of what it is changes replies."""
    for module in ("toy_models", "test_lookup_sampling"):
        monkeypatch.setattr(f"{module}.VOCABULARY", 3)
    monkeypatch.setattr(f"{__name__}.VOCABULARY", 3)
    server = rejecting(partial(UnlikelyChains, 0.3))
    lengths = set()
    for _ in range(12):
        assert every_draft_is_verified(server)
        lengths.add(server.models.candidates.shape[1] - 1)
    assert len(lengths) > 1, "chains end at different lengths"

    def hides(phases, *args):
        return drafted(phases, *args)[:, :-1]

    drafted = LaunchedPhases.draft
    monkeypatch.setattr(LaunchedPhases, "draft", hides)
    assert not every_draft_is_verified(rejecting(partial(UnlikelyChains, 0.3)))
