"""`python -m sglang.launch_server` as a user types it, on the emulated NPU: its HTTP server and the
processes that it spawns serve with our classes and transformers' tokens, and end when told to.

The model is nano-deepseek; tokens are judged by greedy_oracle.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from greedy_oracle import Oracle
from serving.launched_server import LaunchedServer, Reply, ServerConfig, greedy
from step_trace import check_step, events_of, steps_of
from transformers import AutoTokenizer

from npu_emulation.sglang_runs import chat_prompts, prompt
from sglang_ascend.env import TRACE
from sglang_ascend.models.catalog import model_path

CONTEXT = 256
FLAGS = f"""--device npu --attention-backend ascend --context-length {CONTEXT}
    --max-total-tokens 4096 --cuda-graph-bs-decode 4""".split()
QUESTIONS = ("What is 12 plus 30?", "Who are you?", "Is 7 larger than 3?")
PAGE = 128
LONG = prompt(PAGE + 22, seed=3)
TEMPERATURE, TOP_P = 0.8, 0.9


@pytest.fixture(scope="module")
def nano() -> Path:
    return model_path("nano-deepseek")


@pytest.fixture(scope="module")
def oracle(nano: Path) -> Oracle:
    return Oracle(nano)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where our worker, and no other, writes down its steps."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(
    nano: Path, traces: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchedServer]:
    config = ServerConfig(
        nano,
        mtp=True,
        dtype="bfloat16",
        page_size=PAGE,
        flags=tuple(FLAGS),
        variables=((TRACE.name, str(traces)),),
    )
    server = LaunchedServer(config, tmp_path_factory.mktemp("log") / "server.log")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def questions(nano: Path) -> list[list[int]]:
    return chat_prompts(nano, QUESTIONS)


@pytest.fixture(scope="module")
def together(server: LaunchedServer, questions: list[list[int]]) -> list[tuple[list[int], Reply]]:
    """Prompts of a few tokens and of more than a page, asked at once, that end one by one."""
    prompts = [*questions, LONG]

    def ask(prompt: list[int], num_tokens: int) -> Reply:
        return server.generate([prompt], greedy(num_tokens))[0]

    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(ask, prompts, (16, 12, 8, 4)))
    return list(zip(prompts, replies, strict=True))


def chat(server: LaunchedServer, **fields: Any) -> requests.Response:
    """The first question, greedily, until the model ends."""
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    body = {"model": "nano", "messages": messages, "temperature": 0, "max_tokens": 24}
    response = server.post("/v1/chat/completions", **body, **fields)
    assert response.status_code == 200, response.text
    return response


@pytest.fixture(scope="module")
def asked(server: LaunchedServer) -> dict[str, Any]:
    """What the chat says to the first question, at once and with its tokens."""
    (choice,) = chat(server, return_token_ids=True).json()["choices"]
    return choice


def members(group: int) -> list[psutil.Process]:
    """Processes of the group that have not ended."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != "zombie":
                found.append(process)
        except ProcessLookupError:
            continue
    return found


def test_requests_at_once_have_transformers_tokens(server, together, oracle):
    prompts, replies = zip(*together, strict=True)
    assert [len(reply.tokens) for reply in replies] == [16, 12, 8, 4]
    oracle.check_greedy(prompts, [reply.tokens for reply in replies])
    assert max(server.logged_batch_sizes("Decode")) > 1


def test_a_chat_has_transformers_tokens_and_their_text(asked, nano, questions, oracle):
    assert asked["finish_reason"] == "stop"
    assert asked["prompt_token_ids"] == questions[0]
    oracle.check_greedy(questions[:1], [asked["response_token_ids"]])
    tokenizer = AutoTokenizer.from_pretrained(nano)
    text = tokenizer.decode(asked["response_token_ids"], skip_special_tokens=True)
    assert asked["message"]["content"] == text != ""


def test_a_stream_brings_the_same_text_in_pieces(server, asked):
    *events, done, nothing = chat(server, stream=True).text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    pieces = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    pieces = [piece for piece in pieces if piece]
    assert "".join(pieces) == asked["message"]["content"]
    assert len(pieces) > 1


def test_our_classes_serve(server, traces, together):
    """SGLang serves by others in silence: none of them could be taken for these."""
    info = server.info()
    names = ("device", "attention_backend", "speculative_algorithm", "disable_overlap_schedule")
    assert [info[name] for name in names] == ["npu", "ascend", "MTP", False]
    assert info["internal_states"][0]["avg_spec_accept_length"] > 1
    loaded = re.findall(r"Load weight end.* type=(\w+)", server.log())
    assert loaded == ["DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMNextN"]
    assert "Captured MTP's step for batches of [4]" in server.log()
    assert re.findall(r"Decode batch.* npu graph: (\w+)", server.log()).count("True") > 1
    (trace,) = traces.iterdir()
    steps = steps_of(events_of(trace))
    for step in steps:
        check_step(*step)
    num_rows = sum(step["args"]["batch_size"] for step, *_ in steps)
    assert num_rows >= sum(reply.meta["spec_verify_ct"] for _, reply in together) > 0


def test_sampled_tokens_are_of_the_nucleus_and_not_all_the_likeliest(server, questions, oracle):
    sampling = greedy(16) | {"temperature": TEMPERATURE, "top_p": TOP_P}
    replies = server.generate(questions, sampling)
    pairs = [(prompt, reply.tokens) for prompt, reply in zip(questions, replies, strict=True)]
    assert [oracle.outside_nucleus(*pair, TEMPERATURE, TOP_P) for pair in pairs] == [[], [], []]
    assert any(oracle.greedy(*pair).wrong for pair in pairs)


def test_seeds_and_a_grammar_hold_in_company(server, questions):
    sampling = greedy(8) | {"temperature": 1.5, "sampling_seed": 7}
    others = (
        sampling | {"sampling_seed": 8},
        greedy(8) | {"regex": "[a-c]{3}x", "ignore_eos": False},
    )
    replies = server.generate([questions[1]] * 4, [sampling, sampling, *others])
    assert replies[0].tokens == replies[1].tokens != replies[2].tokens
    assert re.fullmatch("[a-c]{3}x", replies[3].text)


def test_a_prompt_past_the_context_is_refused_and_the_server_goes_on(server, questions, oracle):
    response = server.post("/generate", input_ids=[5] * (CONTEXT + 1), sampling_params=greedy(2))
    assert response.status_code == 400
    assert "longer than the model's context length" in response.json()["error"]["message"]
    replies = server.generate(questions[1:2], greedy(2))
    oracle.check_greedy(questions[1:2], [reply.tokens for reply in replies])


def test_it_ends_when_told_to_and_leaves_no_process(server):
    names = {process.name() for process in members(server.pid)}
    assert names >= {"sglang::scheduler", "sglang::detokenizer"}
    os.kill(server.pid, signal.SIGTERM)
    assert psutil.Process(server.pid).wait() == 0
    assert members(server.pid) == []
    assert "Schedulers still alive" not in server.log()
