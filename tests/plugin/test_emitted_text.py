"""A reply does not depend on how many tokens a step emits: not where it stops, not how long it
thinks, not what a session goes on with, not how it streams.

The oracle is SGLang's own code with one token a step, which our hooks leave alone.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ascend.models.catalog import model_path

pytestmark = pytest.mark.sglang

STOP_TOKEN, END_OF_THINKING = 2, 3
PIECES = ["a", "b", " ", "ab", "ba", "\n", "世", "，", "é", "🙂"]


@pytest.fixture(scope="module")
def tokenizer(loaded_plugins):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path("nano-deepseek"))
    tokenizer.additional_stop_token_ids = None
    return tokenizer


def steps_of(tokens: list[int], seed: int) -> list[list[int]]:
    """Cut into steps of 1 to 4 tokens."""
    rng, steps = random.Random(seed), []
    while tokens:
        size = rng.randint(1, 4)
        steps.append(tokens[:size])
        tokens = tokens[size:]
    return steps


class Grammar:
    """Ends with the last token of the reply, and has accepted a step when the step is settled."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens

    def is_terminated(self) -> bool:
        return self.num_left == 0


def settled(
    tokenizer,
    steps,
    stop,
    stop_regex=None,
    max_new_tokens=50,
    grammar=None,
    update=None,
    session=None,
):
    """(reason, reply, tokens of its thinking) of a request that receives `steps`."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        stop=stop,
        stop_regex=stop_regex,
        stop_token_ids=[STOP_TOKEN],
    )
    params.normalize(tokenizer)
    request = Req("0", "", [5, 6], params, vocab_size=len(tokenizer))
    request.tokenizer, request.grammar, request.session = tokenizer, grammar, session
    for step in steps:
        request.output_ids.extend(step)
        if grammar:
            grammar.num_left -= len(step)
        request.update_reasoning_tokens(step, [END_OF_THINKING])
        (update or Req.update_finish_state)(request, len(step))
        assert session or list(request.output_ids[-len(step) :]) == step
        if request.finished():
            break
    assert request.grammar is grammar
    reason = request.finished_reason and request.finished_reason.to_json()
    reply = request.output_ids if session else request.output_ids_through_stop
    return reason, list(reply), request.reasoning_tokens


texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=14).map("".join)
stops = st.lists(st.sampled_from(PIECES).flatmap(lambda a: st.sampled_from([a, a + "b", "b" + a])))


@given(
    text=texts,
    stop=stops,
    pattern=st.sampled_from([None, "ab+", "世|b$"]),
    stop_token_at=st.integers(0, 30),
    thinks_until=st.integers(0, 30),
    max_new_tokens=st.integers(1, 20),
    grammatical=st.booleans(),
    session=st.sampled_from([None, "a session"]),
    seed=st.integers(0, 99),
)
def test_a_reply_ends_where_it_ends_token_by_token(
    tokenizer,
    text,
    stop,
    pattern,
    stop_token_at,
    thinks_until,
    max_new_tokens,
    grammatical,
    session,
    seed,
):
    """A session's next request begins with all tokens that the request has."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    tokens.insert(stop_token_at, STOP_TOKEN)
    tokens.insert(thinks_until, END_OF_THINKING)

    def settle(steps):
        grammar = Grammar(len(tokens)) if grammatical else None
        return settled(tokenizer, steps, stop, pattern, max_new_tokens, grammar, session=session)

    assert settle(steps_of(tokens, seed)) == settle([[token] for token in tokens])


def test_without_the_hook_the_first_of_the_list_wins(tokenizer):
    from sglang.srt.managers.schedule_batch import Req

    tokens = [tokenizer.convert_tokens_to_ids(letter) for letter in "xay"]
    bare = Req.update_finish_state.__wrapped__
    expected = settled(tokenizer, [[token] for token in tokens], ["y", "a"])
    assert expected[0]["matched"] == "a"
    assert settled(tokenizer, [tokens], ["y", "a"]) == expected
    assert settled(tokenizer, [tokens], ["y", "a"], update=bare) != expected


def test_without_the_hook_tokens_behind_the_end_are_thoughts_and_a_sessions(tokenizer):
    from sglang.srt.managers.schedule_batch import Req

    bare, step = Req.update_finish_state.__wrapped__, [7, STOP_TOKEN, 8, 9]
    assert settled(tokenizer, [step], [], session="s")[1:] == ([7, STOP_TOKEN], 2)
    assert settled(tokenizer, [step], [], session="s", update=bare)[1:] == (step, 4)


def streamed(tokenizer, steps) -> str:
    """What a client reads, its chunks put together."""
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager

    manager = object.__new__(DetokenizerManager)
    manager.tokenizer, manager.vocab_size = tokenizer, len(tokenizer)
    manager.decode_status, manager.disable_tokenizer_batch_decode = {}, False
    chunks = []
    for number, step in enumerate(steps, 1):
        output = SimpleNamespace(
            rids=["0"],
            decoded_texts=[""],
            decode_ids=[step],
            read_offsets=[0],
            finished_reasons=[{"type": "length"} if number == len(steps) else None],
            no_stop_trim=[False],
            skip_special_tokens=[True],
            spaces_between_special_tokens=[True],
        )
        chunks += manager._decode_batch_token_id_output(output)
    return "".join(chunks)


@given(text=texts, seed=st.integers(0, 99))
def test_the_chunks_of_a_stream_are_the_text(tokenizer, text, seed):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert streamed(tokenizer, steps_of(tokens, seed)) == tokenizer.decode(tokens)


@given(tokens=st.lists(st.integers(6, 600), min_size=1, max_size=30), seed=st.integers(0, 99))
def test_so_are_those_of_bytes_that_make_no_character(tokenizer, tokens, seed):
    assert streamed(tokenizer, steps_of(tokens, seed)) == tokenizer.decode(tokens)


def test_without_the_hook_a_character_comes_twice(tokenizer, monkeypatch):
    from sglang.srt.managers import detokenizer_manager

    world, letter, smile = (tokenizer.encode(text, add_special_tokens=False) for text in "世a🙂")
    steps = [[*world, smile[0]], [*smile[1:], *letter, smile[0]], smile[1:]]
    tokens = [token for step in steps for token in step]
    assert streamed(tokenizer, steps) == tokenizer.decode(tokens)
    bare = detokenizer_manager.find_printable_text.__wrapped__
    monkeypatch.setattr(detokenizer_manager, "find_printable_text", bare)
    assert streamed(tokenizer, steps) == "世" + tokenizer.decode(tokens)
