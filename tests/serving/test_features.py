"""What a request may ask for beside its prompt means the same with speculation as without.

The oracle is the same server without speculation (greedy tokens identical, values within 2e-4), or
transformers where the draw is random. What speculation cannot give is refused with a sentence.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from launched_server import LaunchedServer, Logprobs, Reply, greedy
from reference_model import ReferenceModel
from server_pairs import TEST_TIMEOUT_S, ask_both, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import lossless_mix

# Seven times the largest seen on a CPU with AVX-512, 2.9e-5 of an output token.
MAX_DIFFERENCE = 2e-4
NEW_TOKENS = 24
ASKED_TOKENS = [5, 77, 400]

Prompts = list[list[int]]

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, 16)


@pytest.fixture
def pair(servers: ServerPool, model_folder: Path) -> list[LaunchedServer]:
    return servers.get_flushed(*plain_and_mtp(model_folder))


def ask(
    pair: list[LaunchedServer], prompts: Prompts, sampling: dict[str, Any], **fields: Any
) -> tuple[list[Reply], list[Reply]]:
    """The replies without and with speculation, to the prompts as one batch."""
    plain, mtp = ask_both(pair, lambda server: server.generate(prompts, sampling, **fields))
    return plain, mtp


def said(replies: list[Reply]) -> list[tuple[Any, ...]]:
    """All that a client sees of each reply but its statistics."""
    return [(reply.tokens, reply.text, reply.meta["finish_reason"]) for reply in replies]


# Log-probabilities.


def asked_logprobs(reply: Reply, kind: str) -> list[list[float]]:
    """Rows of the values of ASKED_TOKENS; a prompt's first token has no row."""
    rows = reply.meta[f"{kind}_token_ids_logprobs"]
    return [[value for value, _, _ in row] for row in rows if row]


def difference(a: Logprobs, b: Logprobs) -> float:
    """Over the chosen tokens and, rank by rank, the likeliest; infinite for other tokens."""
    if a.tokens != b.tokens:
        return float("inf")
    chosen = zip(a.values, b.values, strict=True)
    ranks = zip(a.top, b.top, strict=True)
    top = [
        pair for x, y in ranks for pair in zip(sorted(x.values()), sorted(y.values()), strict=True)
    ]
    return max(abs(x - y) for x, y in [*chosen, *top])


def test_logprobs_of_prompt_output_top_and_asked_tokens_do_not_change(
    pair: list[LaunchedServer], prompts: Prompts
) -> None:
    plain, mtp = ask(
        pair,
        prompts,
        greedy(NEW_TOKENS),
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=5,
        token_ids_logprob=ASKED_TOKENS,
    )
    assert said(plain) == said(mtp)
    for a, b in zip(plain, mtp, strict=True):
        assert len(b.output_logprobs.values) == NEW_TOKENS
        assert all(len(top) == 5 for top in b.output_logprobs.top)
        assert difference(a.output_logprobs, b.output_logprobs) < MAX_DIFFERENCE
        if len(b.prompt_logprobs.values) > 0:
            assert difference(a.prompt_logprobs, b.prompt_logprobs) < MAX_DIFFERENCE
        for kind in ("input", "output"):
            x, y = (torch.tensor(asked_logprobs(reply, kind)) for reply in (a, b))
            assert x.shape == y.shape
            assert kind == "input" or x.shape == (NEW_TOKENS, len(ASKED_TOKENS))
            assert x.numel() == 0 or (x - y).abs().max() < MAX_DIFFERENCE
    assert tokens_per_step(mtp) > 1.3
    # The control: rows that are one position late do not pass.
    late = torch.tensor(plain[0].output_logprobs.values).roll(1)
    assert (late - torch.tensor(mtp[0].output_logprobs.values)).abs().max() > 3 * MAX_DIFFERENCE


def test_a_sampled_tokens_logprob_is_that_of_the_tempered_model(
    pair: list[LaunchedServer], prompts: Prompts, reference: ReferenceModel
) -> None:
    """Draws differ, so that transformers is the oracle of both servers."""
    temperature = 0.7
    sampling = greedy(12) | {"temperature": temperature}

    def worst(replies: list[Reply], tempered_by: float) -> float:
        return max(
            float((torch.tensor(reply.output_logprobs.values) - expected).abs().max())
            for prompt, reply in zip(prompts, replies, strict=True)
            for expected in [tempered(reference, prompt, reply, tempered_by)]
        )

    for replies in ask(pair, prompts, sampling, return_logprob=True):
        assert worst(replies, temperature) < MAX_DIFFERENCE
        assert worst(replies, 1.0) > 3 * MAX_DIFFERENCE


def tempered(
    reference: ReferenceModel, prompt: list[int], reply: Reply, temperature: float
) -> torch.Tensor:
    """float32 [tokens of the reply]."""
    logprobs = reference.logprobs([*prompt, *reply.tokens])[len(prompt) - 1 : -1]
    rows = torch.log_softmax(logprobs / temperature, dim=-1)
    return rows.gather(1, torch.tensor(reply.tokens)[:, None])[:, 0]


# What steers the choice of tokens.


def test_a_logit_bias_counts_on_every_drafted_row(
    pair: list[LaunchedServer], prompts: Prompts
) -> None:
    free, _ = ask(pair, prompts, greedy(NEW_TOKENS))
    usual = {token for reply in free for token in reply.tokens[1::3]}
    bias = {str(token): -100.0 for token in usual}
    plain, mtp = ask(pair, prompts, greedy(NEW_TOKENS) | {"logit_bias": bias})
    assert said(plain) == said(mtp)
    assert not usual & {token for reply in mtp for token in reply.tokens}
    assert sum(reply.meta["spec_num_correct_drafts"] for reply in mtp) > len(prompts)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,9}$"},
        "number": {"type": "integer", "minimum": 10, "maximum": 999},
        "even": {"type": "boolean"},
    },
    "required": ["name", "number", "even"],
    "additionalProperties": False,
}


def is_of_the_schema(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == list(SCHEMA["properties"])
        and re.fullmatch("[a-z]{2,9}", found["name"]) is not None
        and 10 <= found["number"] <= 999
        and isinstance(found["even"], bool)
    )


def is_of_the_pattern(text: str) -> bool:
    return re.fullmatch(r"It is [0-9]{2}( or [0-9]{2})*\.", text) is not None


# Field of the sampling parameters, its value, and a check of a whole reply.
GRAMMARS = {
    "JSON schema": ("json_schema", json.dumps(SCHEMA), is_of_the_schema),
    "regex": ("regex", r"It is [0-9]{2}( or [0-9]{2}){0,3}\.", is_of_the_pattern),
    "EBNF": (
        "ebnf",
        'root ::= "It is " two (" or " two)* "."\ntwo ::= [0-9] [0-9]',
        is_of_the_pattern,
    ),
}


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_grammar_holds_on_every_drafted_row_of_its_own_request_only(
    pair: list[LaunchedServer], prompts: Prompts, grammar: str
) -> None:
    """Every second request of the batch has one. JSON may have any white space between its parts,
    of which a small model does not tire, so that few of these replies end."""
    field, value, is_valid = GRAMMARS[grammar]
    constrained = {"temperature": 0, "max_new_tokens": 100, field: value}
    samplings = [constrained if i % 2 else greedy(NEW_TOKENS) for i in range(len(prompts))]
    plain, mtp = ask(pair, prompts, samplings, return_logprob=True)  # type: ignore[arg-type]
    assert said(plain) == said(mtp)
    for i, reply in enumerate(mtp):
        # Tokens drafted past the end of the grammar are neither shown nor counted.
        assert len(reply.output_logprobs.tokens) == len(reply.tokens)
        finished = reply.meta["finish_reason"]["type"] == "stop"
        assert i % 2 == 0 or not finished or is_valid(reply.text), reply.text
    ended = [reply for reply in mtp[1::2] if reply.meta["finish_reason"]["type"] == "stop"]
    assert ended
    assert sum(reply.meta["spec_num_correct_drafts"] for reply in mtp[1::2]) > 0


def test_a_grammar_that_has_ended_ends_the_reply_before_min_new_tokens(
    pair: list[LaunchedServer], prompts: Prompts
) -> None:
    """Nothing is left to draw then but what ends it."""
    asked = {"regex": "(yes|no)", "min_new_tokens": 20, "max_new_tokens": 30, "sampling_seed": 3}
    for company in ({"temperature": 0}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}):
        plain, mtp = ask(pair, prompts, asked | company)
        assert said(plain) == said(mtp)
        for reply in mtp:
            assert reply.text in ("yes", "no")
            assert reply.meta["finish_reason"]["type"] == "stop"


def test_a_reply_stops_at_a_token_a_string_and_a_pattern_as_without_speculation(
    pair: list[LaunchedServer], prompts: Prompts
) -> None:
    """Accepted drafts behind the stop are not shown; the unstopped reply is the oracle."""
    long, _ = ask(pair, prompts, {"temperature": 0, "max_new_tokens": 40})
    stop_tokens = sorted({reply.tokens[len(reply.tokens) // 2] for reply in long})
    sampling = {"temperature": 0, "max_new_tokens": 40}
    plain, mtp = ask(pair, prompts, sampling | {"stop_token_ids": stop_tokens})
    assert said(plain) == said(mtp)
    for whole, reply in zip(long, mtp, strict=True):
        assert reply.tokens == whole.tokens[: len(reply.tokens)]
        assert not set(reply.tokens[:-1]) & set(stop_tokens)
        assert reply.tokens[-1] in stop_tokens
    words = {"stop": ["the", "\n"], "no_stop_trim": True}, {"stop_regex": "[0-9]+[.,]"}
    for stop in words:
        plain, mtp = ask(pair, prompts, sampling | stop)
        assert said(plain) == said(mtp)
        reasons = {reply.meta["finish_reason"]["type"] for reply in mtp}
        assert "stop" in reasons, stop


def test_n_replies_to_one_prompt(pair: list[LaunchedServer], prompts: Prompts) -> None:
    chosen = prompts[:4]
    plain, twice = ask(pair, chosen, greedy(NEW_TOKENS) | {"n": 2})
    assert said(plain) == said(twice)
    (once, _) = ask(pair, chosen, greedy(NEW_TOKENS))
    assert [reply.tokens for reply in twice] == [r.tokens for r in once for _ in range(2)]
    sampled = pair[1].generate(chosen, greedy(NEW_TOKENS) | {"temperature": 1.0, "n": 4})
    assert len(sampled) == 4 * len(chosen)
    assert all(len(reply.tokens) == NEW_TOKENS for reply in sampled)
    assert len({tuple(reply.tokens) for reply in sampled}) > 2 * len(chosen)


def test_a_session_goes_on_behind_what_was_shown(
    pair: list[LaunchedServer], prompts: Prompts
) -> None:
    """Accepted drafts behind a stop are no part of the next request's prompt."""

    def converse(server: LaunchedServer) -> list[Reply]:
        session = server.post("/open_session", capacity_of_str_len=4000).json()
        replies: list[Reply] = []
        for prompt in prompts[:8]:
            before = replies[-1].meta["id"] if replies else None
            replies += server.generate(
                [prompt],
                {"temperature": 0, "max_new_tokens": 20, "stop_token_ids": stop_tokens},
                session_params={"id": session, "rid": before},
            )
        server.post("/close_session", session_id=session)
        return replies

    long, _ = ask(pair, prompts, greedy(20))
    stop_tokens = sorted({token for reply in long for token in reply.tokens[9:20:5]})
    plain, mtp = ask_both(pair, converse)
    assert said(plain) == said(mtp)
    lengths = [[reply.meta["prompt_tokens"] for reply in replies] for replies in (plain, mtp)]
    assert lengths[0] == lengths[1]
    reasons = [reply.meta["finish_reason"]["type"] for reply in mtp]
    assert reasons.count("stop") > 3


def test_scores_of_candidate_tokens_do_not_change(
    pair: list[LaunchedServer], prompts: Prompts
) -> None:
    body = {"query": prompts[0], "items": prompts[1:5], "label_token_ids": ASKED_TOKENS}
    plain, mtp = (
        server.post("/v1/score", model="default", apply_softmax=True, **body) for server in pair
    )
    assert plain.status_code == mtp.status_code == 200, mtp.text
    a, b = (torch.tensor(response.json()["scores"]) for response in (plain, mtp))
    assert a.shape == (4, len(ASKED_TOKENS))
    assert (a - b).abs().max() < MAX_DIFFERENCE


# What is refused, and what the answer names. The twin serves those marked True.

PROMPT = [5, 6, 7]


def generate(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"input_ids": PROMPT, "sampling_params": greedy(4)} | fields


REFUSED_REQUESTS: dict[str, tuple[tuple[str, dict[str, Any]], str, bool]] = {
    "beam search": (
        generate(sampling_params={"beam_width": 2, "max_new_tokens": 4, "temperature": 0}),
        "Beam search is not supported with speculative decoding",
        True,
    ),
    "sampling mask": (
        generate(return_sampling_mask=True, sampling_params=greedy(4) | {"top_k": 1}),
        "return_sampling_mask is not supported with speculative decoding",
        True,
    ),
    "custom logit processor": (
        generate(custom_logit_processor="{}"),
        "custom logit processor",
        False,
    ),
    "LoRA adapter": (generate(lora_path="adapter"), "--enable-lora", False),
    "hidden states": (generate(return_hidden_states=True), "hidden states", False),
    "watermark": (generate(watermark={"enabled": True}), "watermark", False),
    "embeddings": (
        ("/v1/embeddings", {"model": "default", "input": PROMPT}),
        "--is-embedding",
        False,
    ),
}


@pytest.mark.parametrize("name", REFUSED_REQUESTS)
def test_a_request_for_what_is_not_served_is_refused_in_words(
    pair: list[LaunchedServer], name: str
) -> None:
    (path, body), words, twin_serves = REFUSED_REQUESTS[name]
    plain, mtp = pair
    answer = mtp.post(path, **body)
    assert answer.status_code == 400, answer.text[:500]
    assert words in answer.text
    assert (plain.post(path, **body).status_code == 200) == twin_serves
    assert said(plain.generate([PROMPT], greedy(4))) == said(mtp.generate([PROMPT], greedy(4)))
