"""State of requests begins with their prompts and advances with each emitted token, also where a
prefill carries rows of requests that decode (a mixed chunk).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_ascend.plugin.mtp.sampling.lossy_acceptance import RelaxedInThinking
from sglang_ascend.plugin.requests.penalties import RequestPenalties
from sglang_ascend.sampling.lossy import Relaxed
from sglang_ascend.sampling.thinking import OUTSIDE

START, END, OTHER, VOCAB_SIZE = 5, 6, 1, 8


class Tokenizer:
    unk_token_id = 0

    def convert_tokens_to_ids(self, text: str) -> int:
        return {"<think>": START, "</think>": END}[text]


def request(prompt: list[int], output: tuple[int, ...] = ()):
    params = {"frequency_penalty": 1.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    return SimpleNamespace(
        rid=str(prompt),
        origin_input_ids=prompt,
        output_ids=list(output),
        retraction_count=0,
        sampling_params=SimpleNamespace(**params, min_new_tokens=0),
    )


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__


def mixed_chunk(last_token: int):
    """A prompt in row 2 of the pool, and the decoding request of row 0 with its last token."""
    new, decoding = (Hashable(**vars(request(*of))) for of in (([OTHER, START],), ([OTHER],)))
    return SimpleNamespace(
        reqs=[new, decoding],
        decoding_reqs=[decoding],
        req_pool_indices=torch.tensor([2, 0]),
        input_ids=torch.tensor([OTHER, START, last_token]),
        seq_lens=torch.tensor([2, 2]),
        sampling_info=SimpleNamespace(
            acc_additive_penalties=torch.zeros(2, VOCAB_SIZE), acc_scaling_penalties=None
        ),
    )


def prompt_of_the_decoding_request(batch: SimpleNamespace) -> SimpleNamespace:
    """The prefill that it began with."""
    alone = {"reqs": batch.decoding_reqs, "decoding_reqs": None}
    info = SimpleNamespace(acc_additive_penalties=torch.zeros(1, VOCAB_SIZE))
    lens = {"req_pool_indices": torch.tensor([0]), "seq_lens": torch.tensor([1])}
    return SimpleNamespace(**alone, **lens, sampling_info=info)


@pytest.mark.parametrize(("last_token", "length"), [(START, 0), (END, OUTSIDE), (OTHER, OUTSIDE)])
def test_thinking_follows_the_prompt_and_the_last_token(last_token, length):
    state = RelaxedInThinking(Relaxed(1, 0.1), Tokenizer(), 3, "cpu")
    batch = mixed_chunk(last_token)
    state.prefill(prompt_of_the_decoding_request(batch))
    state.prefill(batch)
    assert state._sections._length.tolist() == [length, OUTSIDE, 0]


@pytest.mark.parametrize("last_token", [START, OTHER])
def test_an_emitted_token_is_counted_and_a_prompt_is_not(last_token):
    state = RequestPenalties(3, VOCAB_SIZE, "cpu")
    batch = mixed_chunk(last_token)
    state.prefill(prompt_of_the_decoding_request(batch))
    state.prefill(batch)
    expected = torch.zeros(2, VOCAB_SIZE)
    expected[1, last_token] = -1.0
    assert torch.equal(batch.sampling_info.acc_additive_penalties, expected)


def test_a_request_that_begins_again_counts_what_it_had_emitted_once():
    state = RequestPenalties(3, VOCAB_SIZE, "cpu")
    batch = mixed_chunk(OTHER)
    batch.reqs[0].output_ids = [END, END]
    for _ in range(2):
        state.prefill(batch)
    assert batch.sampling_info.acc_additive_penalties[0].tolist() == [0.0] * END + [-2.0, 0.0]


def decode_of(request_: SimpleNamespace, row: int, last_token: int) -> SimpleNamespace:
    return SimpleNamespace(
        reqs=[request_],
        decoding_reqs=None,
        req_pool_indices=torch.tensor([row]),
        input_ids=torch.tensor([last_token]),
        seq_lens=torch.tensor([1 + len(request_.output_ids)]),
        sampling_info=SimpleNamespace(acc_additive_penalties=torch.zeros(1, VOCAB_SIZE)),
    )


def test_a_request_that_comes_back_without_a_prefill_counts_what_it_had_emitted():
    """On a decode server, in another row of the pool, behind a step that was dropped."""
    state = RequestPenalties(3, VOCAB_SIZE, "cpu")
    one, other = (Hashable(**vars(request([OTHER], (START,)))) for _ in range(2))
    state.decode(decode_of(one, 0, START))
    state.decode(decode_of(other, 2, START))
    state.decode(decode_of(one, 0, END))  # dropped
    one.retraction_count += 1
    batch = decode_of(one, 2, START)
    state.decode(batch)
    expected = torch.zeros(1, VOCAB_SIZE)
    expected[0, START] = -1.0
    assert torch.equal(batch.sampling_info.acc_additive_penalties, expected)


def test_a_request_with_the_id_of_another_has_its_own_penalties():
    state = RequestPenalties(3, VOCAB_SIZE, "cpu")
    for penalty in (1.0, 0.5):
        new = Hashable(**vars(request([OTHER], (START,))))
        new.sampling_params.frequency_penalty = penalty
        batch = decode_of(new, 0, START)
        state.decode(batch)
        assert batch.sampling_info.acc_additive_penalties[0, START] == -penalty
