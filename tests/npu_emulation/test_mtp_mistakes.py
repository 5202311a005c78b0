"""A mistake in MTP's step on an NPU makes tokens wrong, or stops.

Each is a line of ours or of SGLang's undone (mutated_mtp.py); without it the same requests are
right. A wait too many leaves the tokens right: the budget of a step finds it.
"""

from __future__ import annotations

import pytest

from npu_emulation.mtp_runs import MTP, SHORT_CONTEXT, check_budget
from npu_emulation.report import Steady
from npu_emulation.sglang_runs import FUSED_ATTENTION, prompt, requests, start

PROMPTS = [prompt(length, seed) for seed, length in enumerate((14, 19), start=1)]
# They get their second page of 128 tokens in steps that follow one another.
ENDING_A_PAGE = [prompt(length, seed) for seed, length in enumerate((114, 115, 116, 117))]
FLAGS = (*MTP, *SHORT_CONTEXT, "--cuda-graph-bs-decode")


def run(deepseek, mistake: str, prompts=PROMPTS, max_new_tokens: int = 8):
    waves = [requests(prompts, max_new_tokens=max_new_tokens)]
    program = ("npu_emulation.mutated_mtp", mistake)
    return start(deepseek, waves, (*FLAGS, str(len(prompts))), FUSED_ATTENTION, program)


@pytest.mark.parametrize(
    "mistake",
    [
        "swapped_block_table",
        pytest.param("mask_off_by_one", marks=pytest.mark.slow),
        pytest.param("lengths_of_the_first_step", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_makes_every_request_wrong(deepseek, oracle, mistake):
    process, report = run(deepseek, mistake)
    assert report is not None, process.stderr[-3000:]
    judged = [oracle.greedy(*pair) for pair in zip(PROMPTS, report.tokens, strict=True)]
    assert all(judgement.wrong for judgement in judged), judged


@pytest.mark.slow
def test_lengths_copied_from_memory_that_is_written_again_make_a_request_wrong(deepseek, oracle):
    process, report = run(deepseek, "one_buffer_for_lengths", ENDING_A_PAGE, max_new_tokens=20)
    assert report is not None, process.stderr[-3000:]
    judged = [oracle.greedy(*pair) for pair in zip(ENDING_A_PAGE, report.tokens, strict=True)]
    assert any(judgement.wrong for judgement in judged), judged


@pytest.mark.slow
def test_lengths_that_are_read_before_their_copy_make_a_request_wrong(deepseek, oracle):
    _, report = run(deepseek, "trusted_copies_of_lengths", ENDING_A_PAGE, max_new_tokens=20)
    if report is not None:  # else they were no lengths at all
        judged = [oracle.greedy(*pair) for pair in zip(ENDING_A_PAGE, report.tokens, strict=True)]
        assert any(judgement.wrong for judgement in judged), judged


@pytest.mark.slow
def test_lengths_that_land_late_are_waited_for(deepseek, oracle):
    process, report = run(deepseek, "late_copies_of_lengths", ENDING_A_PAGE, max_new_tokens=20)
    assert report is not None, process.stderr[-3000:]
    oracle.check_greedy(ENDING_A_PAGE, report.tokens)


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        pytest.param("one_row_too_few", "is invalid for input of size", marks=pytest.mark.slow),
        # What the host reads too early is no number of kept drafts.
        ("no_wait_for_results", "in update_spec_correct_drafts_histogram"),
    ],
)
def test_a_mistake_stops_the_server(deepseek, mistake, reason):
    process, report = run(deepseek, mistake)
    assert report is None
    assert process.returncode != 0
    assert reason in process.stderr


def test_a_wait_in_every_step_leaves_tokens_right_and_breaks_the_budget(deepseek, oracle):
    _, report = run(deepseek, "a_wait_in_every_step")
    oracle.check_greedy(PROMPTS, report.tokens)
    step = report.steady()
    assert step.calls["stream_syncs"] > 0
    with pytest.raises(AssertionError, match="stream_syncs"):
        check_budget(step, Steady({"launches": 1000, "event_syncs": 100}, 0, 1, 1))
