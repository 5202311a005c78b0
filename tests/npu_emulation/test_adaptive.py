"""`--speculative-adaptive` on the emulated NPU: each K has graphs of its own, and between replays
the MTP layer catches up with what steps without drafts have left out.

K is given (forced_drafts.py), or chosen by what the device's events say of steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from acceptance_oracle import AcceptanceOracle, Judgement, Step

from npu_emulation.mtp_runs import MTP, SHORT_CONTEXT, check_budget, decodes, served_by_mtp
from npu_emulation.report import Report, steady
from npu_emulation.sglang_runs import FUSED_ATTENTION, requests, served
from npu_emulation.test_mtp import (
    CHUNKS_OF_A_PAGE,
    DEEPSEEK,
    GRAPH_OF_4,
    PAGE,
    PROMPTS,
    SHORT,
    WAVES,
)
from npu_emulation.test_mtp_accepted_steps import FLAGS as IN_FLOAT32
from npu_emulation.test_mtp_fifty_prompts import MAX_SECONDS, prompts_of
from npu_emulation.test_two_ranks import served_by_two
from sglang_ascend.models.catalog import model_path

ADAPTIVE = ("--speculative-adaptive",)
FORCED = ("npu_emulation.forced_drafts",)
# Every change of K, steps without drafts one behind the other, and prompts behind such steps.
SCHEDULE = "3,0,0,2,1,0,3,3,0,0,0,1,2"
SKIPPED_PROMPTS = "0,0,0,3,2,3,0,1,0,0,3,3"
FIRST_TIMES, EVENTS_READ = 4, 2  # steps before, and events of each time
pytestmark = pytest.mark.timeout(MAX_SECONDS + 600)


def forced(
    folder: Path,
    waves: list,
    schedule: str,
    *flags: str,
    mistake: str = "",
) -> Report:
    environ = {"FORCED_DRAFTS": schedule, "MISTAKE": mistake}
    how = {"environ": environ, "program": FORCED, "timeout": MAX_SECONDS}
    return served_by_mtp(folder, waves, *ADAPTIVE, *flags, **how)


@pytest.fixture(scope="module")
def changing(guessable) -> Report:
    return forced(guessable, WAVES, SCHEDULE, *GRAPH_OF_4, *CHUNKS_OF_A_PAGE)


def test_greedy_tokens_are_transformers_whatever_k_a_step_has(changing, exact):
    assert changing.names.items() >= DEEPSEEK.items()
    exact.check_greedy(PROMPTS, changing.tokens)
    assert PAGE in changing.cached_tokens


def test_a_step_of_every_k_is_replayed(changing):
    for turn in decodes(changing, 0):
        assert turn.calls["graph_replays"] == 2
    verified = {chain[3] for steps in changing.accepted for chain in steps}
    assert verified == {0, 1, 2, 3}


@pytest.fixture(scope="module")
def plain(guessable) -> Report:
    return served(guessable, [requests(SHORT, max_new_tokens=16)], GRAPH_OF_4, FUSED_ATTENTION)


@pytest.mark.parametrize("k", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_steady_step_of_any_k_waits_for_its_results_only(guessable, plain, k):
    """To read a time torch_npu waits for two events, of which the clock knows that they passed."""
    waves = [requests(SHORT, max_new_tokens=24)]
    report = forced(guessable, waves, str(k), *GRAPH_OF_4)
    # The first times are read a few steps behind.
    step = steady(decodes(report, 0)[FIRST_TIMES:])
    waits = step.calls["event_syncs"] - EVENTS_READ
    check_budget(replace(step, calls=step.calls | {"event_syncs": waits}), plain.steady())


def test_the_server_chooses_by_its_devices_events(guessable, exact):
    waves = [requests(SHORT, max_new_tokens=40)]
    report = served_by_mtp(guessable, waves, *ADAPTIVE, *GRAPH_OF_4)
    exact.check_greedy(SHORT, report.tokens)


@pytest.fixture(scope="module")
def nano() -> Path:
    return model_path("nano-deepseek")


@pytest.fixture(scope="module")
def layer(nano) -> AcceptanceOracle:
    """Which drafts the MTP layer's definition gives."""
    return AcceptanceOracle(nano)


def judged(
    layer: AcceptanceOracle, folder: Path, num_prompts: int, new_tokens: int, mistake: str = ""
) -> Judgement:
    prompts = prompts_of(folder)[:num_prompts]
    waves = [requests(prompts, max_new_tokens=new_tokens)]
    report = forced(folder, waves, SKIPPED_PROMPTS, *IN_FLOAT32, mistake=mistake)
    assert any("graph_replays" in turn.calls for turn in report.iterations)
    replies = zip(prompts, report.tokens, report.accepted, strict=True)
    found = Judgement.of_all(
        layer.judge(prompt, reply, [Step(*step) for step in steps])
        for prompt, reply, steps in replies
    )
    print(found)
    return found


def test_each_step_accepts_what_the_definition_gives(nano, layer):
    found = judged(layer, nano, 6, 24)
    assert found.wrong == () and found.num_steps >= 60
    assert found.num_ties <= 1


@pytest.mark.slow
def test_each_of_many_steps_accepts_what_the_definition_gives(nano, layer):
    found = judged(layer, nano, len(prompts_of(nano)), 64)
    assert found.wrong == () and found.num_steps >= 1000
    assert found.num_ties <= 2


@pytest.mark.parametrize(
    ("mistake", "num_prompts"),
    [
        ("not_caught_up", 6),
        pytest.param("caught_up_with_tokens_of_others", 6, marks=pytest.mark.slow),
        pytest.param("not_told_of_replays", 6, marks=pytest.mark.slow),
        # Slots must have been another request's.
        pytest.param("never_forgotten", 50, marks=pytest.mark.slow),
    ],
)
def test_a_mistake_in_catching_up_is_found(nano, layer, mistake, num_prompts):
    assert judged(layer, nano, num_prompts, 24, mistake).wrong


@pytest.mark.slow
def test_two_ranks_have_the_k_of_the_first(guessable, exact):
    waves = [requests(SHORT, max_new_tokens=12)]
    flags = (*MTP, *SHORT_CONTEXT, *ADAPTIVE, *GRAPH_OF_4)
    report = served_by_two(guessable, waves, *flags, environ=FUSED_ATTENTION)
    for of_rank in (report, *report.other_ranks):
        exact.check_greedy(SHORT, of_rank.tokens)
