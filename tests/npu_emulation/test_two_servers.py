"""Prefill and decode in two servers on emulated NPUs, MTP in both, and a KV cache that travels by
SGLang's `ascend` backend: transformers' tokens, and the decode server's step as a single server's.

memfabric's engine is stood in for (stand_ins/transfers.py): over poison, in no order.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from greedy_oracle import Oracle

from npu_emulation.mtp_runs import check_budget, decodes, served_by_mtp, tokens_per_step
from npu_emulation.mutated_transfers import MISTAKES, unmistaken
from npu_emulation.report import Report
from npu_emulation.sglang_runs import EAGER, FUSED_ATTENTION, prompt, requests, served
from npu_emulation.test_mtp import DEEPSEEK
from npu_emulation.test_mtp_fifty_prompts import MAX_SECONDS, NUM_TOKENS, prompts_of
from sglang_ascend.models.catalog import model_path

PAGE = 128
APART = ("--disaggregated", "--chunked-prefill-size", str(PAGE))
GRAPH_OF_4 = ("--cuda-graph-bs-decode", "4")
# The last is prefilled, and sent, in two parts.
PROMPTS = [prompt(length, seed) for seed, length in enumerate((9, 14, 150))]
EXTENDED = [*PROMPTS[-1], 77, 78, 79]  # the prefill server has its first page
# The second has one request, so that its batches are full from the first to the last: those of the
# first come to the decode server one after another.
WAVES = [requests(PROMPTS, max_new_tokens=16), requests([EXTENDED], max_new_tokens=24)]
FULL = 1


def prefill_of(report: Report) -> Report:
    assert report.prefill is not None
    return report.prefill


@pytest.fixture(scope="module")
def mtp(guessable: Path) -> Report:
    return served_by_mtp(guessable, WAVES, *APART, *GRAPH_OF_4)


def test_our_worker_serves_in_both(mtp):
    for report in (mtp, prefill_of(mtp)):
        assert report.names.items() >= DEEPSEEK.items()


def test_one_prefills_and_the_other_decodes(mtp):
    assert {turn.forward for turn in prefill_of(mtp).iterations} == {"EXTEND"}
    assert {turn.forward for turn in mtp.iterations} == {"DECODE"}
    assert prefill_of(mtp).cached_tokens == [0, 0, 0, PAGE]


def test_tokens_are_transformers_and_some_drafts_are_kept(mtp, exact):
    exact.check_greedy([*PROMPTS, EXTENDED], mtp.tokens)
    assert prefill_of(mtp).tokens == [tokens[:1] for tokens in mtp.tokens]
    assert tokens_per_step(mtp) > 1.1


def test_a_step_of_the_decode_server_waits_for_its_results_only(mtp, guessable):
    plain = served(guessable, [WAVES[FULL]], (*APART, *GRAPH_OF_4), FUSED_ATTENTION)
    check_step(mtp, plain, FULL)


def check_step(mtp: Report, plain: Report, wave: int) -> None:
    """Of `wave`, which is the only one that `plain` served."""
    check_budget(mtp.steady(wave), plain.steady())
    for turn in decodes(mtp, wave):
        assert turn.calls["graph_replays"] == 2


def test_a_decode_that_begins_before_all_has_arrived_has_wrong_tokens(guessable, exact):
    """Each in a wave of its own, and the first without a mistake."""
    prompts = [prompt(20 + seed, seed) for seed in range(len(MISTAKES))]
    waves = [requests([tokens], max_new_tokens=4) for tokens in prompts]
    program = ("npu_emulation.mutated_transfers",)
    report = served_by_mtp(guessable, waves, *APART, *EAGER, program=program)
    judged = [exact.greedy(*pair) for pair in zip(prompts, report.tokens, strict=True)]
    assert [not judgement.wrong for judgement in judged] == [
        mistake is unmistaken for mistake in MISTAKES
    ]


@pytest.mark.slow
@pytest.mark.timeout(2 * MAX_SECONDS)
def test_fifty_prompts_of_nano_deepseek():
    """The first four, which are given more tokens, show the budget."""
    nano = model_path("nano-deepseek")
    prompts = prompts_of(nano)
    first = requests(prompts[:4], max_new_tokens=24)
    waves = [first, requests(prompts[4:], max_new_tokens=NUM_TOKENS)]
    graphs = (*APART, "--cuda-graph-bs-decode", "4", "8")
    report = served_by_mtp(nano, waves, *graphs, timeout=MAX_SECONDS)
    oracle = Oracle(nano)
    said = oracle.summary(prompts, report.tokens)
    print(f"{said}; {tokens_per_step(report):.2f} tokens a step")
    oracle.check_greedy(prompts, report.tokens)
    assert tokens_per_step(report) > 1.5
    plain = served(nano, [first], graphs, FUSED_ATTENTION, timeout=MAX_SECONDS)
    print(report.steady().calls, plain.steady().calls)
    check_step(report, plain, wave=0)
