"""Lookups under rejection sampling: chains that were drawn and chains that were looked up, in one
batch, emit the target's distribution, which is enumerated.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
import toy_models
from test_lookup import MOST, OF_MTP, Always
from toy_models import MAX_CONTEXT_LEN, GreedySampling, ToyModels, fold, next_token, states_of

from sglang_ascend.ops import sampling
from sglang_ascend.speculative.drawn import with_certain
from sglang_ascend.speculative.lookup.choice import prior_cost
from sglang_ascend.speculative.lookup.drafts import LookupDrafts
from sglang_ascend.speculative.lookup.phases import LookupPhases
from sglang_ascend.speculative.skipped import SkippedRows
from sglang_ascend.speculative.step import LaunchedPhases, StepConstants, speculative_step

VOCABULARY = 3
PROMPT = [0, 1, 1, 0, 0, 1, 2, 0, 1]  # some pairs of tokens stand in it, and others do not
NUM_TOKENS = 5  # behind the first, which the prefill gives
BATCH, NUM_ROUNDS = 500, 6
MIN_P, MAX_P_BROKEN = 1e-3, 1e-6


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(toy_models, "VOCABULARY", VOCABULARY)


def target_probs(states: list[int]) -> torch.Tensor:
    weights = [[1 + state % 7, 1 + state % 11, 1 + state % 5] for state in states]
    return normalised(torch.tensor(weights).float())


def draft_probs(states: list[int]) -> torch.Tensor:
    """Of the MTP layer: halfway to another distribution."""
    other = torch.tensor([[6.0, 1.0, 1.0] if state % 2 else [1.0, 2.0, 6.0] for state in states])
    return (target_probs(states) + normalised(other)) / 2


def normalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(dim=1, keepdim=True)


class SampledToys(ToyModels):
    """Logits that say nothing for certain."""

    def target(self, rows, tokens, requests):
        _, states = super().target(rows, tokens, requests)
        return target_probs(states[:, 0].long().tolist()).log(), states

    def mtp_output(self, states):
        _, hidden = super().mtp_output(states)
        return draft_probs(states).log(), hidden


class Rejection(GreedySampling):
    """``Sampling`` of one step whose drafts are drawn."""

    def __init__(self, drawn_from: torch.Tensor, generator: torch.Generator) -> None:
        super().__init__()
        self.drawn_from, self.generator = drawn_from, generator
        self.next_draft_probs: list[torch.Tensor] = []

    def read_chain(self, candidates):
        super().read_chain(candidates)
        num_drafts = self.width - 1
        probs = torch.zeros(len(candidates), num_drafts, VOCABULARY)
        num_drawn = min(num_drafts, self.drawn_from.shape[1])
        probs[:, :num_drawn] = self.drawn_from[:, :num_drawn]
        self.draft_probs = with_certain(probs, candidates[:, 1:])

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def probabilities(self, logits):
        return logits.exp().view(-1, self.width, VOCABULARY)

    def uniforms(self, positions):
        batch_size = len(positions) // self.width
        return self.uniform(batch_size, self.width - 1), self.uniform(batch_size, self.width)

    def propose(self, logits, positions):
        self.next_draft_probs.append(logits.exp())
        return sampling.inverse_cdf(logits.exp(), self.uniform(len(logits)))


class KeepsQ(LookupPhases):
    """The mistake: a lookup is judged by what the MTP layer's draft was drawn from."""

    def __init__(self, phases, drafts, cost, drawn_from):
        super().__init__(phases, drafts, cost)


class Replies:
    """Of a batch of one prompt."""

    def __init__(self, drafts, phases, seed: int) -> None:
        self.models = models = SampledToys([PROMPT] * BATCH, OF_MTP, next_token)
        self.phases, self.generator = phases, torch.Generator().manual_seed(seed)
        self.constants = [StepConstants(k, BATCH, "cpu") for k in range(MOST + 1)]
        self.skipped = SkippedRows(models.req_to_token.numel(), 1, torch.float64, "cpu")
        self.drafts = drafts(len(models.req_to_token), MAX_CONTEXT_LEN, MOST)
        for row in models.rows.tolist():
            self.drafts.restart(row, PROMPT)
        self.drafts.begin_chains(models.rows)
        # The first chain is the likeliest one.
        self.drawn_from = torch.zeros(BATCH, 0, VOCABULARY)
        self.shares: list[float] = []  # of the batch, that is looked up
        self.num_kept = 0

    def step(self) -> None:
        models = self.models
        width = models.candidates.shape[1]
        rule = Rejection(self.drawn_from, self.generator)
        launched = LaunchedPhases(
            models, rule.propose, self.constants[width - 1], OF_MTP, self.skipped
        )
        requests = models.begin_step()
        requests = replace(requests, max_kv_len=int(requests.seq_lens.max()) + 2 * MOST)
        phases = self.phases(launched, self.drafts, prior_cost(BATCH), rule.next_draft_probs)
        was_lookup = self.drafts.is_lookup[models.rows]
        result = speculative_step(models.candidates, requests, phases, rule, models.publish)
        models.end_step()
        self.shares.append(float(was_lookup.float().mean()))
        self.num_kept += int((result.accept_lens - 1)[was_lookup].sum())
        lasts = models.candidates[:, 0].tolist()
        outcomes = zip(lasts, result.sampled.tolist(), result.accept_lens.tolist(), strict=True)
        for tokens, (last, sampled, kept) in zip(models.committed, outcomes, strict=True):
            tokens += [last, *sampled[: kept - 1]]
        models.candidates = result.candidates
        probs = rule.next_draft_probs
        self.drawn_from = torch.stack(probs, dim=1) if probs else torch.zeros(BATCH, 0, VOCABULARY)

    def all(self) -> list[tuple[int, ...]]:
        begins = len(PROMPT) + 1
        while min(map(len, self.models.committed)) < begins + NUM_TOKENS:
            self.step()
        return [tuple(tokens[begins : begins + NUM_TOKENS]) for tokens in self.models.committed]


def exact() -> dict[tuple[int, ...], float]:
    state = states_of(PROMPT)[-1]
    first = fold(state, next_token(state))
    found = {}
    for reply in itertools.product(range(VOCABULARY), repeat=NUM_TOKENS):
        mass, state = 1.0, first
        for token in reply:
            mass *= float(target_probs([state])[0, token])
            state = fold(state, token)
        found[reply] = mass
    return found


def p_value(drafts, phases) -> float:
    """Goodness of fit; replies that are expected seldom are one."""
    seen, shares, num_kept = Counter(), [], 0
    for seed in range(NUM_ROUNDS):
        replies = Replies(drafts, phases, seed)
        seen.update(replies.all())
        shares += replies.shares
        num_kept += replies.num_kept
    expected, count = exact(), BATCH * NUM_ROUNDS
    cells = np.array([(seen[reply], mass * count) for reply, mass in expected.items()])
    is_rare = cells[:, 1] < 5
    cells = np.vstack([cells[~is_rare], cells[is_rare].sum(axis=0)])
    found = float(scipy.stats.chisquare(*cells.T, sum_check=False).pvalue)
    print(f"p = {found:.1e}, looked up {np.round(shares, 2).tolist()}, of them kept {num_kept}")
    assert any(0.1 < share < 0.9 for share in shares) and num_kept > count / 10
    return found


@pytest.mark.parametrize("drafts", [LookupDrafts, Always])
def test_chains_of_both_kinds_emit_the_targets_distribution(drafts):
    assert p_value(drafts, LookupPhases) > MIN_P


def test_a_lookup_that_is_judged_by_the_mtp_layers_distribution_is_found():
    assert p_value(Always, KeepsQ) < MAX_P_BROKEN
