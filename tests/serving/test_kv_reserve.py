"""A speculative step needs the KV slots that were reserved for it, all of them and no more.

The caches themselves say how far a step writes: every slot that it may not read is poison before
it. The pool has room for a few requests only, and requests are retracted (SGLang's own test
switch), so that slots change hands while steps overlap.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from launched_server import LaunchedServer, ServerConfig, greedy
from server_pairs import TEST_TIMEOUT_S, ask_both
from server_pool import ServerPool
from serving_prompts import conversation

NUM_PROMPTS = 40
NEW_TOKENS = 64
CONCURRENCY = 16
# A few requests fill the pool.
POOL_TOKENS = 1024
REPORT_TIMEOUT_S = 60

ROOT = Path(__file__).parents[2]
PARTS = (ROOT / "benchmarks" / "server_parts", Path(__file__).parent / "watched_pool", ROOT)

SLOW = pytest.mark.slow
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
    pytest.mark.parametrize("variant", ["reserve"]),
]


def reserve_of(num_steps: int) -> int:
    """docs/architecture.md: 3K+1, rounded up to even because SGLang doubles half of it."""
    return (3 * num_steps + 2) // 2 * 2


@pytest.fixture(scope="module")
def watched_pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched_pool")


def pair_of(
    folder: Path, watched_pool: Path, page_size: int, num_steps: int
) -> tuple[ServerConfig, ServerConfig]:
    flags = ("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", str(CONCURRENCY))
    plain = ServerConfig(folder, mtp=False, page_size=page_size, flags=flags)
    variables = {
        "PYTHONPATH": os.pathsep.join(str(part) for part in PARTS),
        "BENCHMARK_PARTS": "watch_slots",
        "WATCHED_POOL": str(watched_pool),
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "9",
    }
    flags += ("--speculative-num-steps", str(num_steps))
    return plain, replace(plain, mtp=True, flags=flags, variables=tuple(variables.items()))


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> list[list[int]]:
    """Whole chains are accepted here, one after another: then a step reaches farthest."""
    questions = held_out_prompts["maths"][:NUM_PROMPTS]
    return [conversation(tokenizer, question) for question in questions]


def replies(server: LaunchedServer, prompts: list[list[int]]) -> list[list[int]]:
    found = server.generate_each(prompts, greedy(NEW_TOKENS), concurrency=CONCURRENCY)
    return [reply.tokens for reply in found]


def watched(watched_pool: Path, reserve: int) -> dict[str, int]:
    """What the server found under this reserve; it says so when it is idle again."""
    report = watched_pool / "report.json"
    report.unlink(missing_ok=True)
    deadline = time.monotonic() + REPORT_TIMEOUT_S
    while not report.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    found = json.loads(report.read_text())
    print(found)
    assert found[str(reserve)]["steps"] > NEW_TOKENS // 2
    return found[str(reserve)]


@pytest.mark.parametrize(
    ("page_size", "num_steps"),
    [
        pytest.param(1, 15, marks=SLOW),
        pytest.param(1, 2, marks=SLOW),
        (1, 3),
        pytest.param(16, 3, marks=SLOW),
    ],
)
def test_a_step_reaches_no_farther_than_its_reserve(
    servers: ServerPool,
    model_folder: Path,
    watched_pool: Path,
    prompts: list[list[int]],
    page_size: int,
    num_steps: int,
    variant: str,
) -> None:
    pair = servers.get(*pair_of(model_folder, watched_pool, page_size, num_steps))
    expected, found = ask_both(pair, lambda server: replies(server, prompts))
    assert found == expected, "a step has read poison"
    assert "#retracted_reqs" in pair[1].log(), "slots must change hands while steps overlap"
    result = watched(watched_pool, reserve_of(num_steps))
    assert result["unseen"] == 0
    assert result["min_spare"] >= 0
    if page_size == 1 and num_steps < 4:
        # Two whole chains in a row use the reserve up: it is not merely generous.
        assert result["min_spare"] == reserve_of(num_steps) - (3 * num_steps + 1)


@pytest.mark.parametrize("missing", [1, pytest.param(2, marks=SLOW)])
def test_a_shorter_reserve_is_seen(
    servers: ServerPool,
    model_folder: Path,
    watched_pool: Path,
    prompts: list[list[int]],
    missing: int,
    variant: str,
) -> None:
    """The control: one slot less, and the 2K+2 of SGLang's own order."""
    (server,) = servers.get(pair_of(model_folder, watched_pool, page_size=1, num_steps=3)[1])
    reserve = reserve_of(3) - missing
    (watched_pool / "reserve").write_text(str(reserve))
    try:
        replies(server, prompts)
        result = watched(watched_pool, reserve)
    finally:
        (watched_pool / "reserve").unlink()
    assert result["min_spare"] == -missing
    assert result["unseen"] == 0
