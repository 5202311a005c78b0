"""The step: whatever is drafted, what is emitted is plain greedy decoding, and the caches hold
what decoding alone would have put there.

The oracle decodes with the toy language model from scratch for every token.
"""

import inspect
from dataclasses import replace

import pytest
import torch
from toy_models import (
    DRAFTS,
    GreedySampling,
    ToyModels,
    adversarial,
    decode_greedily,
    fold,
    make_prompts,
    mixed,
    perfect,
    states_of,
)

from sglang_ascend.ops import chain
from sglang_ascend.speculative import step
from sglang_ascend.speculative.step import (
    LaunchedPhases,
    Phases,
    StepResult,
    accept,
    speculative_step,
)


def run_step(models: ToyModels, phases: Phases) -> StepResult:
    requests = models.begin_step()
    result = speculative_step(models.candidates, requests, phases, GreedySampling(), models.publish)
    models.end_step()
    return result


def check_step(models: ToyModels, phases: Phases | None = None) -> list[int]:
    """Runs one step, checks all that it leaves behind, and commits it; accepted lengths."""
    seq_lens = models.seq_lens
    width = models.num_steps + 1
    phases = phases or models.phases()
    result = run_step(models, phases)
    hidden = phases.hidden.view(len(models.committed), width)
    decodes = ["decode"] * (models.num_steps - 1)
    assert models.calls == ["target", "publish", "extend", *decodes]
    assert torch.equal(result.new_seq_lens, seq_lens + result.accept_lens)
    assert torch.equal(models.published, result.new_seq_lens)

    accept_lens = result.accept_lens.tolist()
    for written, num_decodes in ((models.target_written, 0), (models.mtp_written, len(decodes))):
        assert written - models.nobodys == {
            models.slot(request, len(tokens) + offset)
            for request, tokens in enumerate(models.committed)
            for offset in {*range(width), *(accept_lens[request] + j for j in range(num_decodes))}
        }

    for request, tokens in enumerate(models.committed):
        accept_len = accept_lens[request]
        emitted = result.sampled[request, :accept_len].tolist()
        # The old bonus token enters the caches; the last emitted one is the next bonus.
        truth = decode_greedily(tokens, accept_len + 1)
        assert emitted == truth[len(tokens) + 1 :]
        tokens += truth[len(tokens) : -1]
        states = states_of(tokens)
        # Of each emitted token the row that it was drawn from.
        assert hidden[request, :accept_len].tolist() == states[-accept_len:]
        assert int(result.new_seq_lens[request]) == len(tokens)
        drafted = models.chain_after(fold(states[-1], truth[-1]))
        assert result.candidates[request].tolist() == [truth[-1], *drafted]
        for position, token in enumerate(tokens):
            slot = models.slot(request, position)
            assert models.target_cache[slot] == token
            following = truth[position + 1]
            assert models.mtp_cache[slot] == (states[position], following)
    models.candidates = result.candidates
    return accept_lens


@pytest.mark.parametrize("predict", DRAFTS)
@pytest.mark.parametrize("batch_size", [1, 3, 7])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_a_chain_that_a_prefill_began_gets_its_other_drafts(num_steps, batch_size, predict):
    models = ToyModels(make_prompts(batch_size), num_steps, predict)
    bonuses = models.candidates[:, 0].tolist()
    states = [
        fold(states_of(tokens)[-1], bonus)
        for tokens, bonus in zip(models.committed, bonuses, strict=True)
    ]
    phases, requests = models.phases(), models.begin_step()
    phases.prepare(models.candidates[:, :2], requests)
    hidden = torch.tensor(states, dtype=torch.float64)[:, None]
    completed = phases.complete(hidden, torch.ones(batch_size))
    assert torch.equal(completed, models.candidates)
    assert models.calls == ["decode"] * (num_steps - 1)
    # What it left in the slots behind the prompt is in nobody's way.
    for _ in range(3):
        check_step(models)
    if num_steps > 1:  # the control: the output of another row
        models = ToyModels(make_prompts(batch_size), num_steps, predict)
        phases, requests = models.phases(), models.begin_step()
        phases.prepare(models.candidates[:, :2], requests)
        with pytest.raises(AssertionError, match="the chain is broken"):
            phases.complete(hidden + 1, torch.ones(batch_size))


@pytest.mark.parametrize("predict", DRAFTS)
@pytest.mark.parametrize("batch_size", [1, 2, 7])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
def test_many_steps_emit_what_plain_greedy_decoding_says(num_steps, batch_size, predict):
    prompts = make_prompts(batch_size)
    models = ToyModels(prompts, num_steps, predict)
    for _ in range(9):
        check_step(models)
    for prompt, tokens in zip(prompts, models.committed, strict=True):
        assert tokens == decode_greedily(prompt, len(tokens) - len(prompt))


@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_a_perfect_draft_is_accepted_whole(num_steps):
    models = ToyModels(make_prompts(7), num_steps, perfect)
    assert all(check_step(models) == [num_steps + 1] * 7 for _ in range(5))


@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_a_wrong_draft_costs_nothing_but_time(num_steps):
    models = ToyModels(make_prompts(7), num_steps, adversarial)
    assert all(check_step(models) == [1] * 7 for _ in range(5))


def test_mixed_drafts_are_accepted_to_every_length():
    """Else the steps above would have left some length untried."""
    models = ToyModels(make_prompts(7), 3, mixed)
    assert {length for _ in range(9) for length in check_step(models)} == {1, 2, 3, 4}


def test_the_step_leaves_its_inputs_alone():
    models = ToyModels(make_prompts(3), 3, mixed)
    requests, candidates = models.begin_step(), models.candidates
    before = [candidates.clone(), requests.seq_lens.clone(), requests.req_pool_indices.clone()]
    speculative_step(candidates, requests, models.phases(), GreedySampling(), models.publish)
    after = [candidates, requests.seq_lens, requests.req_pool_indices]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_what_was_accepted_is_told_to_the_sampling():
    """Penalties count the candidates whose rows were kept, not the tokens sampled behind them."""
    models, sampling = ToyModels(make_prompts(3), 3, mixed), GreedySampling()
    candidates = models.candidates
    requests = models.begin_step()
    result = speculative_step(candidates, requests, models.phases(), sampling, models.publish)
    ((told, accept_lens),) = sampling.committed
    assert torch.equal(told, candidates) and torch.equal(accept_lens, result.accept_lens)


def test_the_step_fits_a_page():
    for function in (speculative_step, accept, LaunchedPhases.draft):
        assert len(inspect.getsource(function).splitlines()) < 45


# Mistakes in the phases and in the rule: what check_step must catch.


class Unshifted(LaunchedPhases):
    """Pairs hidden j with token j, as if nothing had been dropped."""

    def draft(self, sampled, accept_lens, new_seq_lens):
        return super().draft(self.candidates, accept_lens, new_seq_lens)


class LateWindow(LaunchedPhases):
    """Writes one slot past the window."""

    def prepare(self, candidates, requests):
        return super().prepare(candidates, replace(requests, seq_lens=requests.seq_lens + 1))


class SwappedRequests(LaunchedPhases):
    """The first two requests read each other's slots."""

    def prepare(self, candidates, requests):
        rows = requests.req_pool_indices.clone()
        rows[:2] = rows[:2].flip(0)
        return super().prepare(candidates, replace(requests, req_pool_indices=rows))


class LateLengths(LaunchedPhases):
    """What a row attends to has the length of the step before."""

    def prepare(self, candidates, requests):
        positions = super().prepare(candidates, requests)
        metadata = self.rows.metadata
        late = replace(metadata, kv_lens=metadata.kv_lens - 1)
        self.rows = replace(self.rows, metadata=late)
        return positions


class LateDecode(LaunchedPhases):
    """Drafts after the first run one position late, as if lengths had been shifted with tokens."""

    def draft(self, sampled, accept_lens, new_seq_lens):
        return super().draft(sampled, accept_lens, new_seq_lens + 1)


class DraftsBehindTheLastRow(LaunchedPhases):
    """Drafts continue from row K, accepted or not."""

    def draft(self, sampled, accept_lens, new_seq_lens):
        return super().draft(sampled, torch.full_like(accept_lens, sampled.shape[1]), new_seq_lens)


class BlockTableReadLate(LaunchedPhases):
    """The MTP layer reads the scheduler's slot lists after they were handed back."""

    def draft(self, sampled, accept_lens, new_seq_lens):
        table = self.requests.req_to_token[self.requests.req_pool_indices]
        metadata = replace(self.rows.metadata, block_table=table)
        self.rows = replace(self.rows, metadata=metadata)
        return super().draft(sampled, accept_lens, new_seq_lens)


@pytest.mark.parametrize("num_steps", [3])
@pytest.mark.parametrize(
    "mistaken",
    [
        Unshifted,
        LateWindow,
        SwappedRequests,
        LateLengths,
        LateDecode,
        DraftsBehindTheLastRow,
        BlockTableReadLate,
    ],
)
def test_a_mistake_in_the_phases_would_be_seen(mistaken, num_steps):
    models = ToyModels(make_prompts(4), num_steps, mixed)
    with pytest.raises((AssertionError, KeyError, IndexError, RuntimeError)):
        for _ in range(6):
            check_step(models, mistaken(models, models.propose, models.constants))


def accept_one_too_many(logits, candidates, positions, sampling):
    """Keeps a draft that the target does not stand by."""
    drawn, accept_lens = accept(logits, candidates, positions, sampling)
    return drawn, (accept_lens + 1).clamp_max(drawn.shape[1])


def accept_any_match(logits, candidates, positions, sampling):
    """Counts the drafts that equal their draws, also behind one that does not."""
    drawn = sampling.draw(logits, positions)
    return drawn, ((drawn[:, :-1] == candidates[:, 1:]).sum(dim=1) + 1).int()


def accept_against_the_next_row(logits, candidates, positions, sampling):
    """Judges draft j by row j, which has already seen it."""
    drawn = sampling.draw(logits, positions)
    return drawn, chain.verify_chain(drawn.roll(-1, dims=1), candidates[:, 1:])


@pytest.mark.parametrize(
    "rule", [accept_one_too_many, accept_any_match, accept_against_the_next_row]
)
def test_a_mistake_in_the_rule_would_be_seen(rule, monkeypatch):
    monkeypatch.setattr(step, "accept", rule)
    models = ToyModels(make_prompts(7), 3, mixed)
    with pytest.raises((AssertionError, KeyError, IndexError, RuntimeError)):
        for _ in range(9):
            check_step(models)
