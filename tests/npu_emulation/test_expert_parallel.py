"""Two ranks that hold half of the experts each (`--moe-a2a-backend deepep`), emulated NPUs: plain
decode and MTP have transformers' greedy tokens, and a step of MTP keeps its budget against a plain
one of the same deployment.

Prompts are exchanged in DeepEP's normal mode, which waits, and steps in that of low latency, in
their graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from greedy_oracle import Oracle

from npu_emulation.mtp_runs import MTP, SHORT_CONTEXT, check_budget, decodes, tokens_per_step
from npu_emulation.report import Report
from npu_emulation.sglang_runs import (
    EAGER,
    FUSED_ATTENTION,
    chat_prompts,
    prompt,
    requests,
    served,
    start,
)
from npu_emulation.test_mtp import DEEPSEEK, MANY, NUM_TOKENS
from sglang_ascend.models.catalog import model_path

DEEPEP = ("--tp-size", "2", "--moe-a2a-backend", "deepep")
# Four rows of each of eight requests, half of them in each rank.
ENVIRON = FUSED_ATTENTION | {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "16"}
GRAPH_OF_4 = ("--cuda-graph-bs-decode", "4")
STEP = (*MTP, *SHORT_CONTEXT)
SHORT = [prompt(length, seed) for seed, length in enumerate((9, 14, 19))]
QUESTIONS = ("What is 12 plus 30?", "Who are you?")
GREEDY, SAMPLED = 0, 1  # waves
TEMPERATURE, TOP_P = 0.8, 0.9
CLEAN, BY_NORMAL = "deep_ep:clean_low_latency_buffer", "deep_ep:normal dispatch"
# In a graph with a row of no request.
WAVES = [
    requests(SHORT, max_new_tokens=12),
    requests(SHORT, max_new_tokens=12, temperature=TEMPERATURE, top_p=TOP_P),
]
# An odd number of them, that end one after another.
ENDING = [
    request
    for tokens, new in zip(MANY, NUM_TOKENS, strict=True)
    for request in requests([tokens], max_new_tokens=new)
]
SECONDS = 580  # of a server


def served_by_experts(folder: Path, waves: list[Any], *flags: str, **kwargs: Any) -> Report:
    kwargs = {"timeout": SECONDS} | kwargs
    report = served(folder, waves, (*DEEPEP, *flags), environ=ENVIRON, **kwargs)
    (other,) = report.other_ranks
    assert other.left_undone == []
    return report


def of_both(report: Report) -> list[Report]:
    return [report, *report.other_ranks]


@pytest.fixture(scope="module")
def plain(guessable) -> Report:
    return served_by_experts(guessable, WAVES, *GRAPH_OF_4)


@pytest.fixture(scope="module")
def mtp(guessable) -> Report:
    return served_by_experts(guessable, WAVES, *GRAPH_OF_4, *STEP)


def test_plain_decode_has_transformers_tokens_in_both_ranks(plain, exact):
    for report in of_both(plain):
        exact.check_greedy(SHORT, report.tokens[: len(SHORT)])
        assert {turn.calls["graph_replays"] for turn in decodes(report, GREEDY)} == {1}


@pytest.mark.parametrize("way", ["plain", "mtp"])
def test_a_prompt_is_exchanged_in_normal_mode_and_buffers_are_cleaned_once_behind_it(way, request):
    for report in of_both(request.getfixturevalue(way)):
        prefills = [turn for turn in report.iterations if turn.forward == "EXTEND"]
        assert all(BY_NORMAL in turn.kernels for turn in prefills)
        first, *others = decodes(report, GREEDY)
        assert first.kernels.count(CLEAN) == 1
        assert all(CLEAN not in turn.kernels for turn in others)


def test_mtp_has_transformers_tokens_in_both_ranks_and_keeps_some_drafts(mtp, exact):
    for report in of_both(mtp):
        assert report.names.items() >= DEEPSEEK.items()
        exact.check_greedy(SHORT, report.tokens[: len(SHORT)])
    assert tokens_per_step(mtp) > 1.1


def test_a_step_is_two_graphs_in_which_rows_are_exchanged(mtp):
    for report in of_both(mtp):
        for turn in decodes(report, GREEDY):
            assert turn.calls["graph_replays"] == 2
            assert [name for name in turn.launched if name.startswith("Hccl")] == []


def test_sampled_tokens_are_the_same_in_both_ranks_and_of_the_nucleus(mtp, exact):
    ours, others = (report.tokens[len(SHORT) :] for report in of_both(mtp))
    assert ours == others
    pairs = zip(SHORT, ours, strict=True)
    assert [exact.outside_nucleus(*pair, TEMPERATURE, TOP_P) for pair in pairs] == [[]] * len(SHORT)


def test_no_rank_s_step_waits_for_more_than_its_results(mtp, plain):
    for report in of_both(mtp):
        for wave in (GREEDY, SAMPLED):
            check_budget(report.steady(wave), plain.steady(wave))


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [GRAPH_OF_4, EAGER], ids=["too small", "none"])
def test_a_batch_that_no_graph_holds_is_launched_in_the_mode_of_low_latency(
    guessable, exact, graphs
):
    for report in of_both(served_by_experts(guessable, [ENDING], *graphs, *STEP)):
        exact.check_greedy(MANY, report.tokens)
        launched = [turn for turn in decodes(report, 0) if "graph_replays" not in turn.calls]
        assert any(turn.num_requests == len(MANY) for turn in launched)
        for turn in launched:
            assert "deep_ep:low latency dispatch" in turn.kernels
            assert BY_NORMAL not in turn.kernels


@pytest.mark.slow
def test_nano_deepseek_keeps_its_drafts_and_its_budget():
    nano = model_path("nano-deepseek")
    prompts = chat_prompts(nano, QUESTIONS)
    waves, graph = [requests(prompts, max_new_tokens=16)], ("--cuda-graph-bs-decode", "2")
    plain, mtp = (served_by_experts(nano, waves, *graph, *flags) for flags in ((), STEP))
    oracle = Oracle(nano)
    for report in (*of_both(plain), *of_both(mtp)):
        oracle.check_greedy(prompts, report.tokens)
    assert tokens_per_step(mtp) > 1.5
    check_budget(mtp.steady(), plain.steady())


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        pytest.param(
            "forgotten_mode", "call clean_low_latency_buffer between them", marks=pytest.mark.slow
        ),
        # torch_npu's error of a copy to the host that is captured.
        ("captured_prefill_mode", "error code is 107030"),
    ],
)
def test_a_mistake_stops_the_server_with_its_reason(guessable, mistake, said):
    process, report = start(
        guessable,
        [requests(SHORT, max_new_tokens=4)],
        (*DEEPEP, *GRAPH_OF_4, *STEP),
        ENVIRON,
        program=("npu_emulation.mutated_experts", mistake),
        timeout=SECONDS,
    )
    assert report is None
    assert process.returncode != 0
    assert said in process.stderr
