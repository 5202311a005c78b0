"""No step touches a KV slot that its requests do not own: every other slot is poisoned and watched.

The pool has room for a few requests only and requests are retracted (SGLang's own test switch), so
that slots change hands while steps overlap.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launched_server import LaunchedServer, Reply, ServerConfig, greedy
from server_pairs import TEST_TIMEOUT_S
from server_pool import ServerPool
from serving_prompts import conversation

NUM_PROMPTS = 24
NEW_TOKENS = 48
# A few requests fill the pool.
POOL_TOKENS = 1024

PARTS = Path(__file__).parents[2] / "benchmarks" / "server_parts"
POISON = Path(__file__).parent / "poisoned_pool"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]


def config(
    folder: Path, page_size: int, num_steps: int, mtp: bool, reserve: str, report: Path
) -> ServerConfig:
    flags = ("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "16")
    plain = ServerConfig(folder, mtp=False, page_size=page_size, flags=flags)
    if not mtp:
        return plain
    variables = {
        "PYTHONPATH": os.pathsep.join(str(part) for part in (PARTS, POISON)),
        "BENCHMARK_PARTS": "poison",
        "POISON_REPORT": str(report),
        "KV_RESERVE": reserve,
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "9",
    }
    steps = ("--speculative-num-steps", str(num_steps))
    return replace(plain, mtp=True, flags=flags + steps, variables=tuple(variables.items()))


def ask(server: LaunchedServer, prompts: list[list[int]]) -> list[Reply]:
    return server.generate_each(prompts, greedy(NEW_TOKENS), concurrency=16)


def watched(report: Path) -> dict[str, Any]:
    """What the server found, once it is idle."""
    time.sleep(1.0)
    return json.loads(report.read_text())


@pytest.mark.parametrize(
    ("variant", "page_size", "num_steps"),
    [
        ("reserve", 1, 3),
        ("reserve", 16, 3),
        ("reserve", 1, 15),
    ],
)
def test_a_step_stays_in_its_own_slots(
    servers: ServerPool,
    model_folder: Path,
    tokenizer,
    held_out_prompts,
    tmp_path: Path,
    variant: str,
    page_size: int,
    num_steps: int,
) -> None:
    reports = {reserve: tmp_path / f"{reserve}.json" for reserve in ("ours", "in tree")}
    plain, ours, in_tree = servers.get(
        config(model_folder, page_size, num_steps, False, "", tmp_path),
        *(
            config(model_folder, page_size, num_steps, True, reserve, report)
            for reserve, report in reports.items()
        ),
    )
    # Whole chains are accepted here, one after another: then a step reaches farthest.
    questions = held_out_prompts["maths"][:NUM_PROMPTS]
    prompts = [conversation(tokenizer, question) for question in questions]
    expected = ask(plain, prompts)
    found = ask(ours, prompts)
    assert [reply.tokens for reply in found] == [reply.tokens for reply in expected]
    assert "#retracted_reqs" in ours.log(), "slots must change hands while steps overlap"
    result = watched(reports["ours"])
    print(result)
    assert result["steps"] > NEW_TOKENS // 2
    assert result["written"] == 0
    # The control: with the reserve of SGLang's own order the tail writes past it.
    ask(in_tree, prompts)
    assert watched(reports["in tree"])["written"] > 0
