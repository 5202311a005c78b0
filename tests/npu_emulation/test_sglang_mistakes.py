"""A mistake in how SGLang drives the NPU changes tokens, or stops, at the step that makes it.

Each mistake is one line of SGLang's own code undone; without it the same requests are right.
"""

from __future__ import annotations

import pytest

from npu_emulation.sglang_runs import FUSED_ATTENTION, prompt, requests, start

PROMPTS = [prompt(length, seed) for seed, length in enumerate((9, 14, 19))]
WAVES = [requests(PROMPTS, max_new_tokens=4)]
FIRST_DECODED = 1  # the token before it is the prefill's


def run(deepseek, mistake: str):
    program = ("npu_emulation.mutated", mistake)
    return start(deepseek, WAVES, environ=FUSED_ATTENTION, program=program)


@pytest.mark.parametrize(
    "mistake", [pytest.param("stale_lengths", marks=pytest.mark.slow), "no_wait_for_results"]
)
def test_a_mistake_makes_every_request_wrong_from_the_first_decoded_token(
    deepseek, oracle, mistake
):
    process, report = run(deepseek, mistake)
    assert report is not None, process.stderr[-3000:]
    judged = [oracle.greedy(*pair) for pair in zip(PROMPTS, report.tokens, strict=True)]
    assert [judgement.wrong[:1] for judgement in judged] == [[FIRST_DECODED]] * len(PROMPTS)


def test_an_update_of_a_graph_that_may_still_run_stops_with_the_reason(deepseek):
    process, report = run(deepseek, "no_wait_before_update")
    assert report is None
    assert process.returncode != 0
    assert "wait for the replay before the next update" in process.stderr
