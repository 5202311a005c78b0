"""A running request can be watched, aborted and paused, and the weights changed beneath it.

The oracle is the same server without speculation; the servers are shared, so that each test also
leaves them as they were: idle, no KV page lost, the first weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests
from launched_server import REQUEST_TIMEOUT_S, LaunchedServer, Reply, greedy
from safetensors.torch import load_file, save_file
from server_pairs import TEST_TIMEOUT_S, ask_both, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import lossless_mix

NEW_TOKENS = 40
# Long enough that a request is still running seconds after its first chunk arrived.
LONG = 500
# One that is to be aborted need not be waited for.
TO_ABORT = 3000
WEIGHTS = "model.safetensors"
NEXTN = "model.layers.4."

Prompts = list[list[int]]

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, 8)


@pytest.fixture
def pair(servers: ServerPool, model_folder: Path) -> list[LaunchedServer]:
    return servers.get_flushed(*plain_and_mtp(model_folder))


def stream(server: LaunchedServer, path: str, **body: Any) -> Iterator[dict[str, Any]]:
    """The events of one streamed request, as they arrive."""
    response = requests.post(
        f"{server.url}{path}", json=body | {"stream": True}, stream=True, timeout=REQUEST_TIMEOUT_S
    )
    assert response.status_code == 200, response.text
    for line in response.iter_lines(chunk_size=1, decode_unicode=True):
        event = line.removeprefix("data: ")
        if event and event != "[DONE]":
            yield json.loads(event)


def control(server: LaunchedServer, path: str, **body: Any) -> None:
    response = server.post(path, **body)
    assert response.status_code == 200, response.text


def tokens_of(replies: list[Reply]) -> Prompts:
    return [reply.tokens for reply in replies]


def assert_both_answer_alike(pair: list[LaunchedServer], prompts: Prompts) -> list[Reply]:
    plain, mtp = ask_both(pair, lambda server: server.generate(prompts, greedy(NEW_TOKENS)))
    assert tokens_of(plain) == tokens_of(mtp)
    return mtp


def test_the_chunks_of_a_stream_make_the_whole_reply(
    pair: list[LaunchedServer], prompts: Prompts
) -> None:
    plain, mtp = pair
    for prompt, whole in zip(prompts, plain.generate(prompts, greedy(NEW_TOKENS)), strict=True):
        request = {"input_ids": prompt, "sampling_params": greedy(NEW_TOKENS)}
        events = list(stream(mtp, "/generate", **request))
        for before, after in pairwise(events):
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert events[-1]["output_ids"] == whole.tokens
        assert events[-1]["text"] == whole.text
        assert events[-1]["meta_info"]["finish_reason"] == whole.meta["finish_reason"]
        assert len(events) > 4
        request = {"model": "default", "prompt": prompt, "temperature": 0}
        request |= {"max_tokens": NEW_TOKENS, "ignore_eos": True}
        pieces = [
            event["choices"][0]["text"] for event in stream(mtp, "/v1/completions", **request)
        ]
        assert "".join(pieces) == whole.text
        assert len(pieces) > 4


def test_an_aborted_request_ends_and_leaves_nothing_behind(
    pair: list[LaunchedServer], prompts: Prompts
) -> None:
    mtp = pair[1]
    request = {"input_ids": prompts[0], "sampling_params": greedy(TO_ABORT), "rid": "to-abort"}
    other = {"input_ids": prompts[1], "sampling_params": greedy(LONG), "rid": "to-keep"}
    events, others = stream(mtp, "/generate", **request), stream(mtp, "/generate", **other)
    next(events), next(others)
    control(mtp, "/abort_request", rid="to-abort")
    *_, last = events
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    *_, kept = others
    assert kept["meta_info"]["finish_reason"]["type"] == "length"
    assert len(kept["output_ids"]) == LONG
    # Refused unless the server is idle; SGLang checks then that every KV slot is free.
    mtp.flush_cache()
    assert_both_answer_alike(pair, prompts)


def test_a_client_that_goes_away_aborts_its_request(
    pair: list[LaunchedServer], prompts: Prompts
) -> None:
    mtp = pair[1]
    request = {"input_ids": prompts[0], "sampling_params": greedy(TO_ABORT)}
    with requests.post(
        f"{mtp.url}/generate", json=request | {"stream": True}, stream=True, timeout=60
    ) as response:
        next(response.iter_lines())
    control(mtp, "/flush_cache?timeout=60")
    assert_both_answer_alike(pair, prompts)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_request_goes_on_with_the_same_tokens(
    pair: list[LaunchedServer], prompts: Prompts, mode: str
) -> None:
    """Paused with a step in flight; `retract` also gives up the KV, which may then be flushed."""
    plain, mtp = pair
    (whole,) = plain.generate(prompts[:1], greedy(LONG))
    request = {"input_ids": prompts[0], "sampling_params": greedy(LONG)}
    events = stream(mtp, "/generate", **request)
    seen = [next(events)]
    control(mtp, "/pause_generation", mode=mode)
    try:
        # Without a timeout: a paused server never looks again whether it is idle.
        flushed = mtp.post("/flush_cache")
        # In place, the request still holds its pages.
        assert flushed.status_code == (200 if mode == "retract" else 400), flushed.text
    finally:
        control(mtp, "/continue_generation")
    seen += events
    assert seen[-1]["output_ids"] == whole.tokens
    assert len(seen[0]["output_ids"]) < LONG // 2, "the pause came too late to matter"
    mtp.flush_cache()


def with_weights(folder: Path, copy: Path, factors: Callable[[str], float]) -> Path:
    """A checkpoint whose tensors are those of `folder` times a factor by name."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / WEIGHTS)
    changed = {name: tensor * factors(name) for name, tensor in tensors.items()}
    save_file(changed, copy / WEIGHTS, metadata={"format": "pt"})
    return copy


def test_an_update_reaches_every_weight_of_the_model_and_of_the_mtp_layer(
    pair: list[LaunchedServer], prompts: Prompts, model_folder: Path, tmp_path: Path
) -> None:
    """Packed copies of the weights included: the replies are those of the new weights."""
    plain, mtp = pair
    before = assert_both_answer_alike(pair, prompts)
    other = with_weights(
        model_folder, tmp_path / "other", lambda name: 1.5 if "layers.1." in name else 1.0
    )
    no_draft = with_weights(
        model_folder, tmp_path / "no-draft", lambda name: 0.0 if name.startswith(NEXTN) else 1.0
    )
    try:
        for server in pair:
            server.update_weights(other)
        assert tokens_of(assert_both_answer_alike(pair, prompts)) != tokens_of(before)
        plain.update_weights(model_folder)
        # The same model, an MTP layer of zeros: the same tokens, but its drafts are worthless.
        mtp.update_weights(no_draft)
        undrafted = assert_both_answer_alike(pair, prompts)
        assert tokens_of(undrafted) == tokens_of(before)
        assert tokens_per_step(undrafted) < 1.1 < 1.5 < tokens_per_step(before)
    finally:
        for server in pair:
            server.update_weights(model_folder)
    after = assert_both_answer_alike(pair, prompts)
    assert tokens_of(after) == tokens_of(before)
    assert tokens_per_step(after) == tokens_per_step(before)


def test_a_pause_that_aborts_ends_every_request(
    pair: list[LaunchedServer], prompts: Prompts
) -> None:
    mtp = pair[1]
    request = {"input_ids": prompts[0], "sampling_params": greedy(TO_ABORT)}
    events = stream(mtp, "/generate", **request)
    next(events)
    control(mtp, "/pause_generation", mode="abort")
    *_, last = events
    control(mtp, "/continue_generation")
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    mtp.flush_cache()
    assert_both_answer_alike(pair, prompts)
