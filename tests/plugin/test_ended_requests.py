"""A request whose tokens end it is known before SGLang has seen them; the oracle is SGLang's own
``Req.update_finish_state``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ascend.models.catalog import model_path

pytestmark = pytest.mark.sglang

STOP_TOKEN = 11


@pytest.fixture(scope="module")
def tokenizer(loaded_plugins):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path("nano-deepseek"))
    tokenizer.additional_stop_token_ids = None
    return tokenizer


def request_of(tokenizer, max_new_tokens: int, ignore_eos: bool, eos_token_ids, emitted):
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(
        max_new_tokens=max_new_tokens, stop_token_ids=[STOP_TOKEN], ignore_eos=ignore_eos
    )
    params.normalize(tokenizer)
    request = Req("0", "", [5, 6], params, eos_token_ids=eos_token_ids, vocab_size=len(tokenizer))
    request.tokenizer = tokenizer
    request.output_ids.extend(emitted)
    return request


@given(
    before=st.integers(0, 6),
    tokens=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    max_new_tokens=st.integers(1, 12),
    ignore_eos=st.booleans(),
    eos_token_ids=st.sampled_from([None, {9}, {3, 4}]),
)
def test_a_request_ends_where_sglang_ends_it(
    tokenizer, before, tokens, max_new_tokens, ignore_eos, eos_token_ids
):
    from sglang_ascend.plugin.mtp.sampling.batch import ends

    request = request_of(tokenizer, max_new_tokens, ignore_eos, eos_token_ids, [20] * before)
    found = ends(request, tokens, before + len(tokens))
    request.output_ids.extend(tokens)
    request.update_finish_state(len(tokens))
    assert found == request.finished()


def test_what_a_grammar_ends_is_left_to_sglang(tokenizer):
    from sglang_ascend.plugin.mtp.sampling.batch import ends

    request = request_of(tokenizer, 3, False, None, [])
    assert ends(request, [STOP_TOKEN], 1) and ends(request, [20], 3)
    assert not ends(request, [20], 2)
    request.grammar = object()
    assert not ends(request, [STOP_TOKEN], 3)


def step_of(request, seq_len: int):
    return SimpleNamespace(
        reqs=[request],
        seq_lens=torch.tensor([seq_len]),
        return_logprob=False,
        return_hidden_states=False,
    )


def test_a_request_that_comes_back_from_a_retraction_is_stepped_again(tokenizer):
    """Its last step's result was dropped. Control: the step behind that one is left out."""
    from sglang_ascend.plugin.mtp.sampling.batch import EndedRequests
    from sglang_ascend.speculative.step import StepResult

    request, ended = request_of(tokenizer, 8, True, None, [20] * 6), EndedRequests()
    emitted = torch.tensor([[20, 20]])
    lens = torch.tensor([2], dtype=torch.int32), torch.tensor([9])
    ended.note(step_of(request, 7), StepResult(torch.empty(0), emitted, *lens, emitted))
    assert ended.are_all(step_of(request, 9))
    assert not ended.are_all(step_of(request, 7))
