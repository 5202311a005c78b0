"""Each step on the emulated NPU accepts the drafts that the MTP layer's definition gives, in fp32.

A real one has no fp32 attention of this shape, and SGLang rounds its experts to bfloat16
(float32_experts.py): it is the step's host side, launches and graphs that are judged. The oracle is
acceptance_oracle.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from acceptance_oracle import AcceptanceOracle, Judgement, Step

from npu_emulation.mtp_runs import served_by_mtp
from npu_emulation.sglang_runs import requests
from npu_emulation.test_mtp_fifty_prompts import MAX_SECONDS, prompts_of
from sglang_ascend.models.catalog import model_path

FLAGS = ("--dtype", "float32", "--chunked-prefill-size", "128", "--cuda-graph-bs-decode", "8")
Served = tuple[list[int], list[int], list[Step]]  # prompt, reply, and its steps
pytestmark = pytest.mark.timeout(MAX_SECONDS + 600)


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_path("nano-deepseek")


@pytest.fixture
def oracle(folder: Path) -> AcceptanceOracle:
    return AcceptanceOracle(folder)


def served(folder: Path, prompts: list[list[int]], new_tokens: int) -> list[Served]:
    asked = [requests(prompts, max_new_tokens=new_tokens)]
    program = ("npu_emulation.float32_experts",)
    report = served_by_mtp(folder, asked, *FLAGS, program=program, timeout=MAX_SECONDS)
    assert any("graph_replays" in turn.calls for turn in report.iterations)
    steps = [[Step(*pair) for pair in pairs] for pairs in report.accepted]
    return list(zip(prompts, report.tokens, steps, strict=True))


def judge(oracle: AcceptanceOracle, replies: list[Served]) -> Judgement:
    found = Judgement.of_all(oracle.judge(*reply) for reply in replies)
    print(found)
    return found


@pytest.mark.slow
def test_every_step_of_many_requests(folder: Path, oracle: AcceptanceOracle):
    found = judge(oracle, served(folder, prompts_of(folder), 64))
    assert found.wrong == ()
    assert found.num_steps >= 1000
    assert found.num_ties <= 1


def test_every_step_of_a_few_requests(folder: Path, oracle: AcceptanceOracle):
    """And a layer with other weights would have accepted other drafts."""
    replies = served(folder, prompts_of(folder)[:8], 12)
    found = judge(oracle, replies)
    assert found.num_steps > 15
    assert found.wrong == ()
    for parameter in oracle.layer.parameters():
        parameter.data = parameter.data.roll(1, 0)
    assert judge(oracle, replies).wrong
