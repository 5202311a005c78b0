"""docs/decode-step.md lists what one greedy decode step executes on CPU, and nothing else.

What Numba compiled is not seen; it stands in the file of the function that calls it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from function_trace import check_documented
from launched_server import ServerConfig, greedy
from server_pairs import TEST_TIMEOUT_S
from server_pool import ServerPool

MOST_FILES = 14
TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PARTS = (ROOT / "benchmarks" / "server_parts", TESTS / "serving" / "traced_step", TESTS, ROOT)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]


@pytest.fixture
def steps(servers: ServerPool, model_folder: Path, tmp_path: Path) -> list[list[str]]:
    """The functions that each decode step of one reply executed."""
    functions = tmp_path / "functions.json"
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, PARTS)),
        "BENCHMARK_PARTS": "trace_step",
        "STEP_FUNCTIONS": str(functions),
    }
    (server,) = servers.get(
        ServerConfig(model_folder, mtp=True, variables=tuple(variables.items()))
    )
    functions.unlink(missing_ok=True)  # of the warm-up
    server.generate([[5, 6, 7]], greedy(8))
    for _ in range(100):
        if functions.is_file():
            break
        time.sleep(0.1)
    return json.loads(functions.read_text())


@pytest.mark.parametrize("model", ["smollm2-mtp"])
def test_the_page_lists_what_a_step_executes(steps: list[list[str]]) -> None:
    assert len(steps) > 1
    check_documented("On CPU", steps[-1], MOST_FILES)
    # The controls: a file that the page leaves out, and one that it makes up.
    for wrong in (steps[-1][1:], [*steps[-1], "speculative/config.py resolve_config"]):
        with pytest.raises(AssertionError):
            check_documented("On CPU", wrong, MOST_FILES)
