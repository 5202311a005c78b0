"""Four tensor-parallel ranks on emulated NPUs, as test_two_ranks.py has it for two: in each rank
transformers' greedy tokens, by graphs that hold what the ranks exchange, and one draw for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from serving.eight_heads import write_with_eight_heads

from npu_emulation.mtp_runs import MTP, SHORT_CONTEXT, check_budget, decodes, tokens_per_step
from npu_emulation.report import Report
from npu_emulation.sglang_runs import (
    FUSED_ATTENTION,
    Wave,
    chat_prompts,
    prompt,
    requests,
    served,
)
from npu_emulation.test_two_ranks import QUESTIONS
from sglang_ascend.models.catalog import model_path

FOUR = ("--tp-size", "4", "--cuda-graph-bs-decode", "2")
# As in test_two_ranks.py.
SEEDED_APART = FUSED_ATTENTION | {"SYNC_TOKEN_IDS_ACROSS_TP": "1"}
PROMPTS = [prompt(length, seed) for seed, length in enumerate((9, 14))]
TEMPERATURE, TOP_P = 0.8, 0.9
GREEDY, SAMPLED = 0, 1  # waves
WAVES = [
    requests(PROMPTS, max_new_tokens=8),
    requests(PROMPTS, max_new_tokens=8, temperature=TEMPERATURE, top_p=TOP_P),
]
MAX_SECONDS = 540
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * MAX_SECONDS)]


def served_by_four(
    folder: Path, *flags: str, waves: Sequence[Wave] = WAVES, **kwargs: Any
) -> list[Report]:
    report = served(folder, waves, (*FOUR, *flags), timeout=MAX_SECONDS, **kwargs)
    assert [other.left_undone for other in report.other_ranks] == [[]] * 3
    return [report, *report.other_ranks]


@pytest.fixture(scope="module")
def plain(guessable) -> list[Report]:
    return served_by_four(guessable, environ=FUSED_ATTENTION)


@pytest.fixture(scope="module")
def mtp(guessable) -> list[Report]:
    step = (*MTP, *SHORT_CONTEXT, "--seed-per-rank")
    return served_by_four(guessable, *step, environ=SEEDED_APART)


def test_each_rank_has_transformers_tokens_and_keeps_some_drafts(mtp, exact):
    for report in mtp:
        assert report.names["speculative_worker"] == "MTPWorker"
        exact.check_greedy(PROMPTS, report.tokens[: len(PROMPTS)])
        assert tokens_per_step(report) > 1.1


def test_a_step_is_two_graphs_and_a_sampled_one_a_broadcast_beside_them(mtp):
    for report in mtp:
        for wave, beside in ((GREEDY, []), (SAMPLED, ["HcclBroadcast"])):
            for turn in decodes(report, wave):
                assert turn.calls["graph_replays"] == 2
                assert [name for name in turn.launched if name.startswith("Hccl")] == beside


def test_ranks_that_are_seeded_apart_have_the_same_tokens_which_are_of_the_nucleus(mtp, exact):
    first, *others = (report.tokens[len(PROMPTS) :] for report in mtp)
    assert others == [first] * 3
    pairs = list(zip(PROMPTS, first, strict=True))
    assert [exact.outside_nucleus(*pair, TEMPERATURE, TOP_P) for pair in pairs] == [[], []]
    assert any(exact.greedy(*pair).wrong for pair in pairs)


def test_no_rank_s_step_waits_for_more_than_its_results(mtp, plain):
    for ours, others in zip(mtp, plain, strict=True):
        for wave in (GREEDY, SAMPLED):
            check_budget(ours.steady(wave), others.steady(wave))


def test_nano_deepseek_s_step_keeps_its_budget_in_each_rank(tmp_path):
    """Its six heads as eight, which four ranks divide."""
    nano = write_with_eight_heads(model_path("nano-deepseek"), tmp_path / "eight-heads")
    waves = [requests(chat_prompts(nano, QUESTIONS), max_new_tokens=24)]
    ours, others = (
        served_by_four(nano, *step, waves=waves, environ=FUSED_ATTENTION)
        for step in ((*MTP, *SHORT_CONTEXT), ())
    )
    for mtp, plain in zip(ours, others, strict=True):
        assert tokens_per_step(mtp) > 1.1
        check_budget(mtp.steady(), plain.steady())
