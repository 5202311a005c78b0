"""On a CPU no step runs behind the last one of a reply, although the scheduler launches it.

The control is a reply that ends at a string, which only the scheduler looks for: a step more runs.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launched_server import LaunchedServer, Tokens, greedy
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp
from server_pool import ServerPool
from serving_prompts import conversation
from watched_acceptance import with_parts

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]

QUESTIONS = ("Which is larger, 5 or 77?", "What is 12 plus 30?", "Hello!")


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    return tmp_path / "steps"


@pytest.fixture
def server(
    servers: ServerPool, model_folder: Path, steps: Path, variables: dict[str, str]
) -> LaunchedServer:
    _, mtp = plain_and_mtp(model_folder)
    (server,) = servers.get(with_parts(mtp, "count_steps", STEPS=str(steps), **variables))
    return server


def num_behind(server: LaunchedServer, steps: Path, prompt: Tokens, sampling: dict) -> int:
    """Steps of the server beyond those that a reply's tokens are of."""
    steps.unlink(missing_ok=True)
    (reply,) = server.generate([prompt], sampling)
    server.flush_cache()  # waits until nothing runs
    time.sleep(0.1)
    run = len(steps.read_text().splitlines()) if steps.exists() else 0
    return run - reply.meta["spec_verify_ct"]


@pytest.mark.parametrize("model", ["nano-deepseek"])
@pytest.mark.parametrize(
    "variables",
    [{}, {"SGLANG_ASCEND_LOOKUP_DRAFTS": "7", "SGLANG_ASCEND_DRAFT_P_MIN": "0.3"}],
    ids=["K", "lookups and ends"],
)
def test_no_step_runs_behind_a_reply(
    server: LaunchedServer, steps: Path, tokenizer, variables: dict[str, str]
) -> None:
    prompts = [conversation(tokenizer, question) for question in QUESTIONS]
    ends = greedy(200) | {"ignore_eos": False}
    for prompt in prompts:
        assert num_behind(server, steps, prompt, ends) == 0
        assert num_behind(server, steps, prompt, greedy(16)) == 0
        assert num_behind(server, steps, prompt, ends | {"temperature": 0.7}) == 0
    (reply,) = server.generate([prompts[0]], ends)
    assert reply.meta["finish_reason"]["type"] == "stop"
    middle = reply.text.split()[len(reply.text.split()) // 2]
    assert num_behind(server, steps, prompts[0], ends | {"stop": [middle]}) == 1
    # What the server counts of acceptance is of steps that ran.
    together = server.generate_each(prompts * 4, ends, 12)
    assert all(reply.meta["finish_reason"]["type"] == "stop" for reply in together)
