"""MTP with SGLang's fused prolog of latent attention (SGLANG_NPU_USE_MLAPO=1) in its captured step.

nano-deepseek is prefilled by this package, and the prolog writes all of its cache. A DeepSeek of
random weights has the dimensions that a card takes; SGLang's own prefill writes its prompts.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from greedy_oracle import Oracle
from quantized_oracle import QuantizedOracle
from serving.quantized_checkpoints import write_quantized

from npu_emulation.mtp_runs import MTP, SHORT_CONTEXT, served_by_mtp, tokens_per_step
from npu_emulation.report import Report, Steady
from npu_emulation.sglang_runs import (
    FUSED_ATTENTION,
    chat_prompts,
    prompt,
    requests,
    start,
)
from npu_emulation.test_mtp import CHUNKS_OF_A_PAGE, DEEPSEEK, GRAPH_OF_4, PAGE, QUESTIONS
from sglang_ascend.models.catalog import model_path

PROLOG = {"SGLANG_NPU_USE_MLAPO": "1"}
WRITE = "aclnnKvRmsNormRopeCache"  # of the latent and the rotated keys, in one launch
LONG = prompt(PAGE + 20, seed=3)
LATER = [*LONG, 77, 78, 79]  # behind the page that they share


@pytest.fixture(scope="module")
def nano() -> Path:
    return model_path("nano-deepseek")


@pytest.fixture(scope="module")
def chats(nano) -> list[list[int]]:
    return chat_prompts(nano, QUESTIONS)


@pytest.fixture(scope="module")
def judge(nano) -> Oracle:
    return Oracle(nano)


@pytest.fixture(scope="module")
def fused(nano, chats) -> Report:
    return served_by_mtp(nano, [requests(chats, max_new_tokens=16)], *GRAPH_OF_4, environ=PROLOG)


@pytest.fixture(scope="module")
def apart(nano, chats) -> Report:
    return served_by_mtp(nano, [requests(chats, max_new_tokens=16)], *GRAPH_OF_4)


def launched(report: Report, forward: str) -> Counter[str]:
    return Counter(
        name for turn in report.iterations if turn.forward == forward for name in turn.launched
    )


def test_greedy_tokens_are_transformers_and_drafts_are_kept(fused, chats, judge):
    assert fused.names.items() >= DEEPSEEK.items()
    assert any(name.startswith(WRITE) for name in launched(fused, "EXTEND"))
    judge.check_greedy(chats, fused.tokens)
    assert tokens_per_step(fused) > 1.5


def test_a_captured_step_launches_and_waits_as_one_without_the_prolog(fused, apart):
    assert not any(name.startswith(WRITE) for name in launched(apart, "EXTEND"))
    steps: list[Steady] = [report.steady() for report in (fused, apart)]
    assert all(step.num_alike == step.num_iterations for step in steps)
    assert steps[0].calls == steps[1].calls
    assert steps[0].num_kernels == steps[1].num_kernels
    assert steps[0].calls["graph_replays"] == 2


def test_a_forward_with_the_prolog_launches_less(fused, apart):
    """Counted in a prefill of nano-deepseek, whose layers begin as those of a captured step do."""
    with_prolog, without = (
        sum(launched(report, "EXTEND").values()) + num_kernels(report) for report in (fused, apart)
    )
    print(f"launches of a prefill: {with_prolog} with the prolog, {without} without")
    assert with_prolog < without


def num_kernels(report: Report) -> int:
    return sum(len(turn.kernels) for turn in report.iterations if turn.forward == "EXTEND")


def test_keys_of_sglang_s_prefill_and_of_the_prolog_lie_in_one_cache(scaled):
    """A prompt of more than a page in chunks, and one behind its first page."""
    waves = [requests([tokens], max_new_tokens=24) for tokens in (LONG, LATER)]
    report = served_by_mtp(scaled, waves, *GRAPH_OF_4, *CHUNKS_OF_A_PAGE, environ=PROLOG)
    assert report.names.items() >= DEEPSEEK.items()
    assert report.cached_tokens == [0, PAGE]
    Oracle(scaled).check_greedy([LONG, LATER], report.tokens)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory) -> Path:
    from sglang_ascend.models import random_deepseek

    folder = tmp_path_factory.mktemp("scaled")
    random_deepseek.build(folder, token_weight=1.0)
    return folder


@pytest.mark.slow
def test_the_products_of_a_quantized_checkpoint_precede_it_too(nano, chats, tmp_path):
    folder = write_quantized(nano, tmp_path / "int8", "W8A8_DYNAMIC")
    waves = [requests(chats, max_new_tokens=8)]
    report = served_by_mtp(folder, waves, *GRAPH_OF_4, environ=PROLOG)
    names = launched(report, "EXTEND")
    assert any(name.startswith(WRITE) for name in names)
    assert any(name.startswith("aclnnQuantMatmul") for name in names)
    QuantizedOracle(nano).check_greedy(chats, report.tokens)


def mistaken(folder: Path, mistake: str, prompts: list[list[int]]) -> Report:
    waves, flags = [requests(prompts, max_new_tokens=8)], (*MTP, *SHORT_CONTEXT, *GRAPH_OF_4)
    program = ("npu_emulation.mutated_mtp", mistake)
    process, report = start(folder, waves, flags, FUSED_ATTENTION | PROLOG, program)
    assert report is not None, process.stderr[-3000:]
    return report


@pytest.mark.parametrize(
    "mistake",
    ["prolog_without_norm", pytest.param("prolog_swaps_halves", marks=pytest.mark.slow)],
)
def test_a_mistake_in_the_prolog_makes_every_request_wrong(nano, chats, judge, mistake):
    report = mistaken(nano, mistake, chats)
    judged = [judge.greedy(*pair) for pair in zip(chats, report.tokens, strict=True)]
    assert all(judgement.wrong for judgement in judged), judged


@pytest.mark.slow
def test_what_is_refused_would_be_wrong(deepseek, oracle):
    """Positions are not scaled: prompts' keys have the elements of their pairs side by side."""
    prompts = [LONG, prompt(60, seed=4)]
    report = mistaken(deepseek, "prolog_beside_another_prefill", prompts)
    judged = [oracle.greedy(*pair) for pair in zip(prompts, report.tokens, strict=True)]
    assert all(judgement.wrong for judgement in judged), judged


@pytest.mark.slow
def test_two_ranks_have_transformers_tokens(scaled):
    """Each multiplies by its heads' part of the absorbed weights; both write the same cache."""
    prompts = [LONG, prompt(9, seed=0)]
    flags = ("--tp-size", "2", "--cuda-graph-bs-decode", "2")
    report = served_by_mtp(scaled, [requests(prompts, max_new_tokens=8)], *flags, environ=PROLOG)
    judge = Oracle(scaled)
    for rank in (report, *report.other_ranks):
        assert rank.left_undone == []
        judge.check_greedy(prompts, rank.tokens)
    assert len(report.other_ranks) == 1
