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
    ToyModels,
    adversarial,
    decode_greedily,
    fold,
    make_prompts,
    mixed,
    perfect,
    states_of,
)

from sglang_ascend.speculative.step import speculative_step


def check_step(models: ToyModels) -> list[int]:
    """Runs one step, checks all that it leaves behind, and commits it; accepted lengths."""
    seq_lens = models.seq_lens
    width = models.num_steps + 1
    requests = models.begin_step()
    result = speculative_step(models.candidates, requests, models.constants, models)
    models.end_step()
    tails = ["tail"] * (models.num_steps - 1)
    assert models.calls == ["verify", "accept", "publish", "extend", *tails]
    assert torch.equal(result.new_seq_lens, seq_lens + result.accept_lens)
    assert torch.equal(models.published, result.new_seq_lens)

    accept_lens = result.accept_lens.tolist()
    for written, num_tails in ((models.target_written, 0), (models.mtp_written, len(tails))):
        assert written == {
            models.slot(request, len(tokens) + offset)
            for request, tokens in enumerate(models.committed)
            for offset in {*range(width), *(accept_lens[request] + j for j in range(num_tails))}
        }

    for request, tokens in enumerate(models.committed):
        accept_len = accept_lens[request]
        emitted = result.sampled[request, :accept_len].tolist()
        # The old bonus token enters the caches; the last emitted one is the next bonus.
        truth = decode_greedily(tokens, accept_len + 1)
        assert emitted == truth[len(tokens) + 1 :]
        tokens += truth[len(tokens) : -1]
        states = states_of(tokens)
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
    speculative_step(candidates, requests, models.constants, models)
    after = [candidates, requests.seq_lens, requests.req_pool_indices]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_the_step_fits_a_page():
    lines = inspect.getsource(speculative_step).splitlines()
    assert len(lines) < 60


# Broken on purpose: what check_step must catch.


class UnshiftedExtend(ToyModels):
    """Pairs hidden j with token j, as if nothing had been dropped."""

    def verify(self, inputs, candidates):
        self.verified = candidates
        return super().verify(inputs, candidates)

    def extend(self, tokens, hidden, last_rows):
        return super().extend(self.verified, hidden, last_rows)


class LateWindow(ToyModels):
    """Writes one slot past the window."""

    def begin_step(self):
        return replace(super().begin_step(), seq_lens=self.seq_lens + 1)


class SharedRow(ToyModels):
    """Two requests on one row of the slot table."""

    def begin_step(self):
        self.rows[1] = self.rows[0]
        return super().begin_step()


class BlindVerify(ToyModels):
    """The target scores every row as if it were the first."""

    def verify(self, inputs, candidates):
        logits, hidden = super().verify(inputs, candidates)
        width = self.num_steps + 1
        return logits[::width].repeat_interleave(width, dim=0), hidden


class DraftStateKept(ToyModels):
    """The MTP cache keeps what the tail wrote instead of the target's states."""

    def extend(self, tokens, hidden, last_rows):
        kept = dict(self.mtp_cache)
        output = super().extend(tokens, hidden, last_rows)
        self.mtp_cache = self.mtp_cache | kept
        return output


class ShiftedTail(ToyModels):
    """The tail runs one position late, as if lengths had been shifted with the tokens."""

    def tail(self, j, tail, tokens, hidden):
        late = replace(tail, positions=tail.positions + 1, kv_lens=tail.kv_lens + 1)
        return super().tail(j, late, tokens, hidden)


class BlockTableReadLate(ToyModels):
    """The MTP layer reads the scheduler's slot lists after they were handed back."""

    def publish(self, new_seq_lens):
        super().publish(new_seq_lens)
        self.inputs = replace(self.inputs, block_table=self.req_to_token[self.rows])


class TailFromTheLastRow(ToyModels):
    """The tail continues from row K, accepted or not."""

    def extend(self, tokens, hidden, last_rows):
        width = self.num_steps + 1
        return super().extend(tokens, hidden, torch.arange(len(tokens)) * width + width - 1)


@pytest.mark.parametrize(
    "broken",
    [
        UnshiftedExtend,
        LateWindow,
        SharedRow,
        BlindVerify,
        DraftStateKept,
        ShiftedTail,
        BlockTableReadLate,
        TailFromTheLastRow,
    ],
)
def test_a_broken_step_would_be_seen(broken):
    models = broken(make_prompts(4), 3, mixed)
    with pytest.raises((AssertionError, KeyError, IndexError, RuntimeError)):
        for _ in range(6):
            check_step(models)
