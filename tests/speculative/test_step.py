"""The step: whatever is drafted, what is emitted is plain greedy decoding, and the caches hold
what decoding alone would have put there.

The oracle decodes with the toy language model from scratch for every token.
"""

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

from sglang_ascend.ops import chain
from sglang_ascend.speculative.step import draft_chain, speculative_step


def check_step(models: ToyModels) -> list[int]:
    """Runs one step, checks all that it leaves behind, and commits it; accepted lengths."""
    seq_lens = models.seq_lens
    width = models.num_steps + 1
    models.begin_step()
    result = speculative_step(models.seed, seq_lens, models.num_steps, models)
    drafts = ["draft"] * (models.num_steps - 1)
    assert models.calls == [*drafts, "verify", "sample", "publish", "extend"]
    assert torch.equal(result.new_seq_lens, seq_lens + result.accept_lens)
    assert torch.equal(models.published, result.new_seq_lens)

    window = {
        models.slot(request, len(tokens) + offset)
        for request, tokens in enumerate(models.committed)
        for offset in range(width)
    }
    assert models.target_written == window
    assert models.mtp_written == window

    for request, tokens in enumerate(models.committed):
        accept_len = int(result.accept_lens[request])
        emitted = result.sampled[request, :accept_len].tolist()
        rows = [request * width + row for row in range(accept_len)]
        assert result.accept_index[request].tolist() == rows + [-1] * (width - accept_len)
        # The old bonus token enters the caches; the last emitted one is the next bonus.
        truth = decode_greedily(tokens, accept_len + 1)
        assert emitted == truth[len(tokens) + 1 :]
        tokens += truth[len(tokens) : -1]
        states = states_of(tokens)
        assert int(result.new_seq_lens[request]) == len(tokens)
        assert int(result.seed.bonus_tokens[request]) == truth[-1]
        after_bonus = fold(states[-1], truth[-1])
        assert int(result.seed.hidden_states[request, 0]) == after_bonus
        assert int(result.seed.first_tokens[request]) == models.predict(after_bonus)
        for position, token in enumerate(tokens):
            slot = models.slot(request, position)
            assert models.target_cache[slot] == token
            following = truth[position + 1]
            assert models.mtp_cache[slot] == (states[position], following)
    models.seed = result.seed
    return result.accept_lens.tolist()


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


def test_a_chain_of_one_needs_no_draft_forward():
    models = ToyModels(make_prompts(2), 1, perfect)
    models.begin_step()
    drafted = draft_chain(models.seed, 1, models)
    assert drafted.tolist() == models.seed.first_tokens[:, None].tolist()
    assert models.calls == []


def test_the_step_leaves_its_inputs_alone():
    models = ToyModels(make_prompts(3), 3, mixed)
    seed, seq_lens = models.seed, models.seq_lens
    before = [
        tensor.clone()
        for tensor in (seed.bonus_tokens, seed.first_tokens, seed.hidden_states, seq_lens)
    ]
    models.begin_step()
    speculative_step(seed, seq_lens, 3, models)
    after = [seed.bonus_tokens, seed.first_tokens, seed.hidden_states, seq_lens]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


# Broken on purpose: what check_step must catch.


class UnshiftedExtend(ToyModels):
    """Pairs hidden j with token j, as if nothing had been dropped."""

    def verify(self, candidates):
        self.candidates = candidates
        return super().verify(candidates)

    def extend(self, tokens, hidden, last_rows):
        return super().extend(self.candidates, hidden, last_rows)


class LateWindow(ToyModels):
    """Writes one slot past the window."""

    def begin_step(self):
        super().begin_step()
        self.window = chain.window_slots(
            self.seq_lens + 1, self.rows, self.req_to_token, self.num_steps + 1
        ).view(-1, self.num_steps + 1)


class SharedRow(ToyModels):
    """Two requests on one row of the slot table."""

    def begin_step(self):
        self.rows[1] = self.rows[0]
        super().begin_step()


class BlindVerify(ToyModels):
    """The target scores every row as if it were the first."""

    def verify(self, candidates):
        logits, hidden = super().verify(candidates)
        width = self.num_steps + 1
        return logits[::width].repeat_interleave(width, dim=0), hidden


class DraftStateKept(ToyModels):
    """The MTP cache keeps what the draft wrote instead of the target's states."""

    def extend(self, tokens, hidden, last_rows):
        kept = dict(self.mtp_cache)
        output = super().extend(tokens, hidden, last_rows)
        self.mtp_cache = self.mtp_cache | kept
        return output


@pytest.mark.parametrize(
    "broken", [UnshiftedExtend, LateWindow, SharedRow, BlindVerify, DraftStateKept]
)
def test_a_broken_step_would_be_seen(broken):
    models = broken(make_prompts(4), 3, mixed)
    with pytest.raises((AssertionError, KeyError)):
        for _ in range(6):
            check_step(models)
