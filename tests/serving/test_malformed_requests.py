"""A malformed request gets a 4xx that says what is wrong, and the next good one is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests
from launched_server import REQUEST_TIMEOUT_S, LaunchedServer, greedy
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp
from server_pool import ServerPool

PROMPT = [5, 6, 7]
VOCAB_SIZE, CONTEXT_LEN = 4096, 4096

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]


def generate(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"input_ids": PROMPT, "sampling_params": greedy(2)} | fields


def sampled(**parameters: Any) -> tuple[str, dict[str, Any]]:
    return generate(sampling_params=greedy(2) | parameters)


def vertex(**parameters: Any) -> tuple[str, dict[str, Any]]:
    """Of a path that judges no types."""
    fields = {"sampling_params": greedy(2) | parameters}
    return "/vertex_generate", {"instances": [{"input_ids": PROMPT}], "parameters": fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": "default", "max_tokens": 2} | fields


MESSAGES = [{"role": "user", "content": "Hi."}]

MALFORMED = {
    "negative length": sampled(max_new_tokens=-1),
    "length of another type": sampled(max_new_tokens="many"),
    "negative temperature": sampled(temperature=-1),
    "temperature of another type": sampled(temperature="hot"),
    "temperature that float32 does not hold": sampled(temperature=1e39, min_p=0.1, regex="a+"),
    "top-p above 1": sampled(top_p=2),
    "top-k of 0": sampled(top_k=0, temperature=1),
    "top-k that int32 does not hold": sampled(top_k=2**31, temperature=1),
    "unknown sampling parameter": sampled(nonsense=1),
    "stop of another type": sampled(stop=5),
    "bias outside the vocabulary": sampled(logit_bias={str(VOCAB_SIZE): 1}),
    "stop token past the vocabulary": sampled(stop_token_ids=[10**9], min_new_tokens=1),
    "bias that float32 does not hold": sampled(logit_bias={"5": 1e39}),
    "bias of another type": sampled(logit_bias={"5": "much"}),
    "penalty that is 0 in float32": sampled(repetition_penalty=1e-50),
    "more logprobs than tokens": generate(return_logprob=True, top_logprobs_num=VOCAB_SIZE + 1),
    "logprobs from before the prompt": generate(return_logprob=True, logprob_start_len=-9999),
    "embeddings that JSON does not have": generate(positional_embed_overrides={"5": [0.5]}),
    "invalid regex": sampled(regex="(["),
    "invalid pattern to stop at": sampled(stop_regex=["a", "("]),
    "invalid JSON schema": sampled(json_schema="{not json"),
    "two grammars": sampled(regex="a+", json_schema="{}"),
    "schema that is no text": vertex(json_schema={"type": "object"}),
    "length that is no whole number": vertex(max_new_tokens=2.0),
    "interval of another type": vertex(stream_interval="3"),
    "parameters of another type": generate(sampling_params="greedy"),
    "ids of another type": generate(input_ids="abc"),
    "fractional ids": generate(input_ids=[1.5]),
    "id past the vocabulary": generate(input_ids=[5, VOCAB_SIZE]),
    "id far past the vocabulary": generate(input_ids=[10**9]),
    "negative id": generate(input_ids=[-1, 5]),
    "one bad id in a batch": generate(input_ids=[PROMPT, [5, VOCAB_SIZE]]),
    "session of another type": generate(session_params={"id": {}}),
    "no ids": generate(input_ids=[]),
    "no prompt": generate(input_ids=None),
    "no ids in a batch": generate(input_ids=[PROMPT, []]),
    "a text of no tokens": generate(input_ids=None, text=""),
    "one text of no tokens in a batch": generate(input_ids=None, text=["Hi.", ""]),
    "text of another type": generate(input_ids=None, text=7),
    "prompt past the context": generate(input_ids=[5] * (CONTEXT_LEN + 1)),
    "chat without messages": chat(),
    "chat with an unknown role": chat(messages=[{"role": 3, "content": "Hi."}]),
    "chat of negative length": chat(messages=MESSAGES, max_tokens=-4),
}


@pytest.fixture
def mtp_server(servers: ServerPool, model_folder: Path) -> LaunchedServer:
    return servers.get(*plain_and_mtp(model_folder))[1]


def assert_still_serves(server: LaunchedServer) -> None:
    (reply,) = server.generate([PROMPT], greedy(2))
    assert len(reply.tokens) == 2


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_is_refused_and_the_server_goes_on(
    mtp_server: LaunchedServer, name: str
) -> None:
    path, body = MALFORMED[name]
    response = mtp_server.post(path, **body)
    assert 400 <= response.status_code < 500, response.text[:500]
    body = response.json()
    assert body.get("error") or body.get("message"), response.text[:500]
    assert_still_serves(mtp_server)


def test_a_stop_token_of_nobody_stops_nothing_beside_any_request(
    mtp_server: LaunchedServer,
) -> None:
    """SGLang indexes the logits of every request of a batch of which one has min_new_tokens."""
    other = {"temperature": 0, "max_new_tokens": 8}
    samplings = [greedy(8) | {"stop_token_ids": [-7, 10**9]}, other | {"min_new_tokens": 4}]
    replies = mtp_server.generate([PROMPT, PROMPT], samplings)
    (alone,) = mtp_server.generate([PROMPT], greedy(8))
    assert replies[0].tokens == alone.tokens


def test_a_body_that_is_no_json_is_refused_and_the_server_goes_on(
    mtp_server: LaunchedServer,
) -> None:
    response = requests.post(
        f"{mtp_server.url}/generate",
        data='{"input_ids": [1,',
        headers={"Content-Type": "application/json"},
        timeout=REQUEST_TIMEOUT_S,
    )
    assert 400 <= response.status_code < 500, response.text[:500]
    assert_still_serves(mtp_server)
