"""Int8 weights on two emulated NPUs by SGLang's own `modelslim`, as Huawei's recipe of DeepSeek-R1
has them: ranks with requests of their own (data-parallel attention), and ranks with experts of
their own, to which rows travel as int8 with a scale for each (DeepEP).

Greedy tokens are transformers' over the same integers, and a step of MTP keeps its budget against a
plain one of the same deployment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from quantized_oracle import QuantizedOracle
from serving.quantized_checkpoints import write_quantized

from npu_emulation.attention_waves import in_turn
from npu_emulation.mtp_runs import MTP, SHORT_CONTEXT, check_budget, decodes, tokens_per_step
from npu_emulation.quick import slow_but
from npu_emulation.report import Report
from npu_emulation.sglang_runs import FUSED_ATTENTION, chat_prompts, served
from npu_emulation.test_attention_ranks import TWO
from npu_emulation.test_expert_parallel import DEEPEP, ENVIRON
from npu_emulation.test_mtp import QUESTIONS
from npu_emulation.test_mtp_fifty_prompts import MAX_SECONDS, NUM_TOKENS, prompts_of
from npu_emulation.test_quantized_fifty_prompts import FLOAT_STEP
from sglang_ascend.models.catalog import model_path

NANO = model_path("nano-deepseek")
LENGTH = 20
SECONDS = 580  # of a server
pytestmark = pytest.mark.timeout(MAX_SECONDS + 600)
Prompts = list[list[int]]


@dataclass(frozen=True)
class Deployment:
    flags: tuple[str, ...]
    environ: dict[str, str]
    halved: str  # modules whose columns the ranks share, as QuantizedOracle is told
    num_groups: int = 1  # of ranks with requests of their own


DEPLOYMENTS = {
    "data-parallel attention": Deployment(
        (*TWO, "--cuda-graph-bs-decode", "2"), FUSED_ATTENTION, r"experts$|down_proj$", 2
    ),
    # Of attention, and of the layer without experts.
    "experts": Deployment(
        (*DEEPEP, "--cuda-graph-bs-decode", "4"), ENVIRON, r"mlp\.down_proj$|o_proj$"
    ),
}
INT8 = ("--quantization", "modelslim")
STEP = (*MTP, *SHORT_CONTEXT)


def served_by_ranks(
    folder: Path,
    how: Deployment,
    prompts: Prompts,
    *flags: str,
    num_tokens: int = LENGTH,
    **kwargs: Any,
) -> list[Report]:
    wave = in_turn(prompts, how.num_groups, num_tokens)
    kwargs = {"timeout": SECONDS} | kwargs
    report = served(folder, [wave], (*how.flags, *INT8, *flags), how.environ, **kwargs)
    (other,) = report.other_ranks
    assert other.left_undone == []
    return [report, other]


def check_greedy(
    oracle: QuantizedOracle, how: Deployment, ranks: list[Report], prompts: Prompts
) -> None:
    for rank, report in enumerate(ranks):
        own = prompts[rank % how.num_groups :: how.num_groups]
        said = oracle.summary(own, report.tokens)
        print(f"{how.flags}, rank {rank}: {said}; {tokens_per_step(report):.2f} tokens a step")
        oracle.check_greedy(own, report.tokens)


@pytest.fixture(scope="module", params=slow_but("experts", DEPLOYMENTS))
def how(request: pytest.FixtureRequest) -> Deployment:
    return DEPLOYMENTS[request.param]


@pytest.fixture(scope="module")
def int8(tmp_path_factory) -> Path:
    return write_quantized(NANO, tmp_path_factory.mktemp("nano") / "int8", "W8A8_DYNAMIC")


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return chat_prompts(NANO, QUESTIONS)


@pytest.fixture(scope="module")
def integers(how) -> QuantizedOracle:
    return QuantizedOracle(NANO, halved=how.halved)


@pytest.fixture(scope="module")
def mtp(int8, how, prompts) -> list[Report]:
    return served_by_ranks(int8, how, prompts, *STEP)


@pytest.fixture(scope="module")
def plain(int8, how, prompts) -> list[Report]:
    return served_by_ranks(int8, how, prompts)


def test_mtp_has_the_tokens_of_the_integers_and_keeps_some_drafts(mtp, integers, how, prompts):
    check_greedy(integers, how, mtp, prompts)
    assert all(tokens_per_step(report) > 1.1 for report in mtp)
    with pytest.raises(AssertionError):
        check_greedy(integers.with_scales_off_by_one_row(), how, mtp, prompts)


def test_a_step_is_two_graphs_in_which_rows_are_exchanged_and_waits_for_its_results_only(mtp):
    for report in mtp:
        for turn in decodes(report, 0):
            assert turn.calls["graph_replays"] == 2
            assert [name for name in turn.launched if name.startswith("Hccl")] == []
        step = report.steady()
        assert step.num_alike == step.num_iterations
        assert {wait: step.calls.get(wait, 0) for wait in FLOAT_STEP} == FLOAT_STEP


@pytest.mark.slow
def test_plain_decode_has_the_tokens_of_the_integers_and_launches_as_much_as_mtp_may(
    plain, mtp, integers, how, prompts
):
    check_greedy(integers, how, plain, prompts)
    for ours, others in zip(mtp, plain, strict=True):
        check_budget(ours.steady(), others.steady())


@pytest.mark.slow
def test_fifty_prompts_have_the_tokens_of_the_integers(int8):
    """With experts on their ranks one token of 500 is another, in plain decode as well."""
    how, prompts = DEPLOYMENTS["data-parallel attention"], prompts_of(NANO)
    flags = (*STEP, "--cuda-graph-bs-decode", "8")
    limits = {"num_tokens": NUM_TOKENS, "timeout": MAX_SECONDS}
    ranks = served_by_ranks(int8, how, prompts, *flags, **limits)
    check_greedy(QuantizedOracle(NANO, halved=how.halved), how, ranks, prompts)


@pytest.mark.slow
def test_rows_that_arrive_without_their_scales_make_tokens_wrong(int8, prompts):
    how = DEPLOYMENTS["experts"]
    program = ("npu_emulation.mutated_experts", "forgotten_scales")
    mistaken = served_by_ranks(int8, how, prompts, *STEP, program=program)
    with pytest.raises(AssertionError):
        check_greedy(QuantizedOracle(NANO, halved=how.halved), how, mistaken, prompts)
