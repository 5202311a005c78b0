"""What a speculative step costs the framework: at most 30 tensor operations at K = 3, one metadata
build, no wait between target and draft. SGLang's own order needs 101 operations and K + 1 builds.

The models are instant stubs (benchmarks/server_parts), so that all that is counted is framework.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launched_server import ServerConfig, greedy
from server_pairs import TEST_TIMEOUT_S
from server_pool import ServerPool
from step_cost.count_operations import OperationCount

from sglang_ascend.ops import chain, sampling
from sglang_ascend.ops.dispatch import REFERENCE, Op

MAX_OPERATIONS = 30
BATCH = 8
# Drafts: one accepted, one rejected, so that a step emits two tokens.
NEW_TOKENS = 80
OBSERVED = "step cost, observed"

PARTS = Path(__file__).parents[2] / "benchmarks" / "server_parts"
COUNTER = Path(__file__).parent / "step_cost"

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]


@pytest.fixture
def steps(
    servers: ServerPool, model_folder: Path, variant: str, tmp_path: Path
) -> list[dict[str, Any]]:
    """Records of the steps in which all requests decoded."""
    counts = tmp_path / "counts.json"
    variables = {
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in (PARTS, COUNTER)),
        "BENCHMARK_PARTS": "instant_models,count_operations",
        "STEP_TIMES": str(tmp_path / "times.json"),
        "STEP_COUNTS": str(counts),
    }
    flags: tuple[str, ...] = ()
    if variant == OBSERVED:
        flags = ("--enable-metrics",)
        variables["SGLANG_ASCEND_TRACE"] = str(tmp_path / "trace")
    (server,) = servers.get(
        ServerConfig(model_folder, mtp=True, flags=flags, variables=tuple(variables.items()))
    )
    counts.unlink(missing_ok=True)  # of the warm-up
    server.generate([[5 + i] for i in range(BATCH)], greedy(NEW_TOKENS))
    for _ in range(100):
        if counts.is_file():
            break
        time.sleep(0.1)
    records = json.loads(counts.read_text())
    # The first and the last step join or drop requests.
    return [record for record in records if record["batch"] == BATCH][2:-2]


@pytest.mark.parametrize(
    "model",
    # The other one has a draft vocabulary, whose ids each draft is looked up in.
    ["nano-deepseek", pytest.param("smollm2-mtp", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("variant", ["step cost", pytest.param(OBSERVED, marks=pytest.mark.slow)])
def test_a_step_has_one_preparation_few_operations_and_no_wait(
    steps: list[dict[str, Any]], model: str, variant: str, request: pytest.FixtureRequest
) -> None:
    assert len(steps) > NEW_TOKENS // 4
    assert {json.dumps(step["calls"]) for step in steps} == {
        json.dumps({"metadata prepared by the step": 1})
    }
    assert [step["waits"] for step in steps if step["waits"]] == []
    assert [step["uncounted"] for step in steps if step["uncounted"]] == []
    counts = [sum(step["operations"].values()) for step in steps]
    print(f"operations per step: {min(counts)} to {max(counts)}: {steps[-1]['operations']}")
    if model == "smollm2-mtp":
        missed = "33 operations: those of the other model, and a lookup of each of three drafts"
        request.applymarker(pytest.mark.xfail(reason=missed, raises=AssertionError, strict=True))
    assert max(counts) <= MAX_OPERATIONS, steps[-1]["operations"]


# Broken on purpose: what the counter must see.

WAITS = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "truth": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[0]),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: torch.nonzero(x),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_counter_sees_every_kind_of_wait(name: str) -> None:
    x = torch.arange(4)
    with OperationCount() as count, count.watching_methods():
        WAITS[name](x)
    assert count.waits
    assert torch.arange(2).tolist() == [0, 1], "the methods are given back"


def test_the_counter_counts_kernels_and_not_views() -> None:
    x = torch.arange(12)
    with OperationCount() as count, count.watching_methods():
        y = x.view(3, 4).t()[:, None].expand(4, 2, 3)
        y.reshape(-1).add_(1).cumsum(0)
    assert count.operations == ["clone", "add_", "cumsum"]
    assert count.waits == []


CALLS = {
    chain.verify_chain: (torch.zeros(2, 4).long(), torch.zeros(2, 3).long()),  # Numba
    sampling.greedy: (torch.randn(2, 5),),  # NumPy
}


@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.name)
def test_the_counter_lists_what_numba_and_numpy_compute(op: Op) -> None:
    found = {}
    for name in (REFERENCE, op.choose("cpu").name):
        with OperationCount() as count, count.watching_methods():
            op.implementation(name)(*CALLS[op])
        found[name] = bool(count.uncounted)
    assert found == {REFERENCE: False, op.choose("cpu").name: True}
