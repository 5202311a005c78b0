"""The examples run as their first lines say, and print what the server without MTP would reply."""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from begun import template
from launched_server import LaunchedServer
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp
from server_pool import ServerPool

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["smollm2-mtp"]),
]


@pytest.fixture
def pair(servers: ServerPool, model_folder: Path) -> list[LaunchedServer]:
    return servers.get(*plain_and_mtp(model_folder))


def run_example(name: str, *arguments: str) -> str:
    """What the program prints on stdout; its own failure fails the test with its last lines."""
    module = name.removesuffix(".py")
    done = template().run([module, *arguments], os.environ, TEST_TIMEOUT_S, str(EXAMPLES))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def chat_reply(server: LaunchedServer, prompt: str, max_tokens: int) -> str:
    response = server.post(
        "/v1/chat/completions",
        model="default",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=max_tokens,
    )
    return response.json()["choices"][0]["message"]["content"]


def test_the_openai_client_gets_the_plain_server_s_reply_whole_and_streamed(pair):
    plain, mtp = pair
    prompt = "Name three colours."
    printed = run_example(
        "openai_client.py", "--base-url", f"{mtp.url}/v1", "--prompt", prompt, "--max-tokens", "24"
    )
    reply = chat_reply(plain, prompt, 24)
    assert printed == f"{reply}\n{reply}\n"
    # A reply to another question would not do.
    assert chat_reply(plain, "Count to five.", 24) != reply


def test_the_frontend_program_runs_gen_select_fork_and_regex(pair):
    with ThreadPoolExecutor(2) as pool:
        plain, mtp = pool.map(
            lambda server: run_example("frontend_program.py", "--base-url", server.url), pair
        )
    assert mtp == plain
    fields = dict(re.findall(r"^(tip|season|days): (.*)$", mtp, re.MULTILINE))
    assert fields["tip"]
    assert fields["season"] in ("summer", "winter")
    assert re.fullmatch(r"[1-9] days", fields["days"])
    assert re.search(r"^Food: .+ Transport: .+", mtp, re.MULTILINE | re.DOTALL)


def test_the_offline_engine_writes_the_plain_server_s_replies(pair, model_folder: Path):
    plain, _ = pair
    arguments = ("--model-path", str(model_folder), "--max-new-tokens", "16")
    printed = run_example("offline_batch.py", *arguments, "--dtype", "float32")
    replies = re.findall(r"^> (.*)\n((?:.|\n)*?)\n\[accept length (.*)\]$", printed, re.MULTILINE)
    assert len(replies) == 3
    for prompt, reply, accept_length in replies:
        assert reply == chat_reply(plain, prompt, 16).strip()
        assert 1 <= float(accept_length) <= 4


@pytest.mark.slow
def test_sglang_serve_is_launch_server(servers: ServerPool, model_folder: Path):
    plain, mtp = plain_and_mtp(model_folder)
    sglang = Path(sys.executable).with_name("sglang")
    served = replace(mtp, program=(str(sglang), "serve"))
    plain_server, mtp_server = servers.get(plain, served)
    prompt = "Name three colours."
    assert chat_reply(mtp_server, prompt, 24) == chat_reply(plain_server, prompt, 24)
