"""Two tensor-parallel ranks on emulated NPUs, each a process with SGLang's own scheduler, and HCCL
between them: transformers' greedy tokens, in graphs, and one draw for both ranks.

The ranks are seeded differently, so that they agree on what is sampled because one tells the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from greedy_oracle import Oracle

from npu_emulation.mtp_runs import MTP, SHORT_CONTEXT, check_budget, decodes, tokens_per_step
from npu_emulation.report import Report
from npu_emulation.sglang_runs import EAGER, FUSED_ATTENTION, chat_prompts, prompt, requests, served
from sglang_ascend.models.catalog import model_path

# The first token is SGLang's own draw, on which its ranks agree by their seeds, or by this switch.
SEEDED_APART = FUSED_ATTENTION | {"SYNC_TOKEN_IDS_ACROSS_TP": "1"}
GRAPH_OF_2 = ("--cuda-graph-bs-decode", "2")
PROMPTS = [prompt(length, seed) for seed, length in enumerate((9, 14))]
PAGE = 128
# Drafts 2 and 3 behind prompts are launched one by one, before the first step's graphs.
FIRST_CHAIN = 2 * [*3 * ["HcclAllReduce"], "HcclAllGather"]
QUESTIONS = ("What is 12 plus 30?", "Who are you?")
TEMPERATURE, TOP_P = 0.8, 0.9
GREEDY, SAMPLED = 0, 1  # waves
WAVES = [
    requests(PROMPTS, max_new_tokens=8),
    requests(PROMPTS, max_new_tokens=8, temperature=TEMPERATURE, top_p=TOP_P),
]


def served_by_two(folder: Path, waves: list[Any], *flags: str, **kwargs: Any) -> Report:
    report = served(folder, waves, ("--tp-size", "2", *flags), **kwargs)
    (other,) = report.other_ranks
    assert other.left_undone == []
    return report


def served_by_mtp(folder: Path, waves: list[Any], *flags: str, **kwargs: Any) -> Report:
    step = (*MTP, *SHORT_CONTEXT, "--seed-per-rank", *flags)
    return served_by_two(folder, waves, *step, environ=SEEDED_APART, **kwargs)


@pytest.fixture(scope="module")
def plain(guessable) -> Report:
    return served_by_two(guessable, WAVES, *GRAPH_OF_2, environ=FUSED_ATTENTION)


@pytest.fixture(scope="module")
def mtp(guessable) -> Report:
    return served_by_mtp(guessable, WAVES, *GRAPH_OF_2)


def of_both(report: Report) -> list[Report]:
    return [report, *report.other_ranks]


def collectives(launched: list[str]) -> list[str]:
    return [name for name in launched if name.startswith("Hccl")]


def test_plain_decode_has_transformers_tokens_and_its_collectives_in_the_graph(plain, exact):
    for report in of_both(plain):
        exact.check_greedy(PROMPTS, report.tokens[: len(PROMPTS)])
        for turn in decodes(report, GREEDY):
            assert turn.calls["graph_replays"] == 1
            assert collectives(turn.launched) == []


def test_our_worker_and_backend_serve_in_both_ranks(mtp):
    for report in of_both(mtp):
        assert report.names["speculative_worker"] == "MTPWorker"
        assert report.names["attention"] == "NPUAttentionBackend"
        assert report.names["scheduler_loop"] == "overlap"


def test_mtp_has_transformers_tokens_in_both_ranks_and_keeps_some_drafts(mtp, exact):
    for report in of_both(mtp):
        exact.check_greedy(PROMPTS, report.tokens[: len(PROMPTS)])
    assert tokens_per_step(mtp) > 1.1


def test_a_greedy_step_is_two_graphs_which_hold_its_collectives(mtp):
    for report in of_both(mtp):
        first, *others = decodes(report, GREEDY)
        assert first.calls["graph_replays"] == 2
        assert collectives(first.launched) == FIRST_CHAIN
        for turn in others:
            assert turn.calls["graph_replays"] == 2
            assert collectives(turn.launched) == []


def test_a_sampled_step_makes_one_broadcast_beside_its_graphs(mtp):
    for report in of_both(mtp):
        first, *others = decodes(report, SAMPLED)
        assert collectives(first.launched) == [*FIRST_CHAIN, "HcclBroadcast"]
        assert [collectives(turn.launched) for turn in others] == [["HcclBroadcast"]] * len(others)


def test_both_ranks_have_the_same_tokens_which_are_of_the_nucleus(mtp, exact):
    ours, others = (report.tokens[len(PROMPTS) :] for report in of_both(mtp))
    assert ours == others
    pairs = list(zip(PROMPTS, ours, strict=True))
    assert [exact.outside_nucleus(*pair, TEMPERATURE, TOP_P) for pair in pairs] == [[], []]
    assert any(exact.greedy(*pair).wrong for pair in pairs)


def test_no_rank_s_step_waits_for_more_than_its_results(mtp, plain):
    for report in of_both(mtp):
        for wave in (GREEDY, SAMPLED):
            check_budget(report.steady(wave), plain.steady(wave))


@pytest.mark.slow
def test_pages_chunks_and_a_cached_prefix_have_transformers_tokens_too(guessable, exact):
    """One prompt in two chunks, one that begins its next page with a verified row, and the first
    again with more behind it."""
    prompts = [prompt(200, 3), prompt(126, 5)]
    extended = [*prompts[0], 77, 78, 79]
    waves = [requests(prompts, max_new_tokens=8), requests([extended], max_new_tokens=4)]
    chunks = ("--chunked-prefill-size", str(PAGE))
    for report in of_both(served_by_mtp(guessable, waves, *GRAPH_OF_2, *chunks)):
        exact.check_greedy([*prompts, extended], report.tokens)
        assert report.cached_tokens == [0, 0, PAGE]


@pytest.mark.slow
def test_nano_deepseek_keeps_its_drafts_and_has_transformers_tokens():
    nano = model_path("nano-deepseek")
    prompts = chat_prompts(nano, QUESTIONS)
    report = served_by_mtp(nano, [requests(prompts, max_new_tokens=16)], *GRAPH_OF_2)
    oracle = Oracle(nano)
    for each in of_both(report):
        oracle.check_greedy(prompts, each.tokens)
    assert tokens_per_step(report) > 1.5


def test_without_its_all_reduces_tokens_are_wrong(guessable, exact):
    waves = [requests(PROMPTS, max_new_tokens=4)]
    program = ("npu_emulation.mutated_ranks", "no_all_reduce")
    report = served_by_two(guessable, waves, *EAGER, environ=FUSED_ATTENTION, program=program)
    judged = [exact.greedy(*pair) for pair in zip(PROMPTS, report.tokens, strict=True)]
    assert all(judgement.wrong for judgement in judged), judged


@pytest.mark.slow
def test_ranks_that_keep_their_own_draws_differ(guessable):
    waves = [requests(PROMPTS[:1], max_new_tokens=6, temperature=TEMPERATURE, top_p=TOP_P)]
    program = ("npu_emulation.mutated_ranks", "own_draws")
    report = served_by_mtp(guessable, waves, *EAGER, program=program)
    ours, others = (each.tokens for each in of_both(report))
    assert ours != others
