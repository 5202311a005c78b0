"""On a CPU no step runs behind the last one of a reply, although the scheduler launches it, and the
step that is left out counts for nothing.

The control is a reply that ends at a string, which only the scheduler looks for: a step more runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launched_server import LaunchedServer, Tokens, greedy
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp
from server_pool import ServerPool
from serving_prompts import conversation

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]

QUESTIONS = ("Which is larger, 5 or 77?", "What is 12 plus 30?", "Hello!")
RUN = "sglang_ascend:step_phase_seconds_count", "phase", "verify"
COUNTED = "sglang_ascend:drafts_total", "position", "1"


@pytest.fixture
def server(
    servers: ServerPool, model_folder: Path, variables: tuple[tuple[str, str], ...]
) -> LaunchedServer:
    _, mtp = plain_and_mtp(model_folder)
    mtp = replace(mtp, flags=(*mtp.flags, "--enable-metrics"), variables=variables)
    (server,) = servers.get(mtp)
    return server


def num_steps(server: LaunchedServer) -> tuple[int, int]:
    """(run, whose accepted drafts were counted) since the server started."""
    server.flush_cache()  # waits until nothing runs
    samples = server.samples()

    def value(name: str, label: str, of: str) -> int:
        return int(sum(x.value for x in samples if x.name == name and x.labels[label] == of))

    return value(*RUN), value(*COUNTED)


def num_behind(server: LaunchedServer, prompt: Tokens, sampling: dict[str, Any]) -> int:
    """Steps of the server beyond those that a reply's tokens are of."""
    run_before, counted_before = num_steps(server)
    (reply,) = server.generate([prompt], sampling)
    run, counted = num_steps(server)
    assert counted - counted_before == run - run_before
    return run - run_before - reply.meta["spec_verify_ct"]


@pytest.mark.parametrize("model", ["nano-deepseek"])
@pytest.mark.parametrize(
    "variables",
    [(), (("SGLANG_ASCEND_LOOKUP_DRAFTS", "7"), ("SGLANG_ASCEND_DRAFT_P_MIN", "0.3"))],
    ids=["K", "lookups and ends"],
)
def test_no_step_runs_behind_a_reply(
    server: LaunchedServer, tokenizer, variables: tuple[tuple[str, str], ...]
) -> None:
    prompts = [conversation(tokenizer, question) for question in QUESTIONS]
    ends = greedy(200) | {"ignore_eos": False}
    for prompt in prompts:
        assert num_behind(server, prompt, ends) == 0
        assert num_behind(server, prompt, greedy(16)) == 0
        assert num_behind(server, prompt, ends | {"temperature": 0.7}) == 0
    (reply,) = server.generate([prompts[0]], ends)
    assert reply.meta["finish_reason"]["type"] == "stop"
    middle = reply.text.split()[len(reply.text.split()) // 2]
    assert num_behind(server, prompts[0], ends | {"stop": [middle]}) == 1
    together = server.generate_each(prompts * 4, ends, 12)
    assert all(reply.meta["finish_reason"]["type"] == "stop" for reply in together)
