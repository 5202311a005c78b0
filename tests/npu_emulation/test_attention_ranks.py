"""Data-parallel attention on two emulated NPUs: each rank has requests of its own, and shares
experts with the other. Whatever that one has to do, greedy tokens are transformers', what ranks
exchange is in the step's graphs, and a step keeps MTP's budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from greedy_oracle import Oracle

from npu_emulation.attention_waves import (
    GRAPHS,
    GROUPS,
    IDLE,
    LARGE,
    MIXED,
    PREFILLS,
    TEMPERATURE,
    TOP_P,
    UNEVEN,
    WAVES,
    Prompts,
    of_both,
)
from npu_emulation.mtp_runs import MTP, SHORT_CONTEXT, check_budget, decodes, tokens_per_step
from npu_emulation.quick import slow_but
from npu_emulation.report import Iteration, Report
from npu_emulation.sglang_runs import FUSED_ATTENTION, chat_prompts, served, start
from npu_emulation.test_mtp import QUESTIONS
from sglang_ascend.models.catalog import model_path

TWO = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
HEADS = {
    "shared-head": (),
    "local-head": ("--enable-dp-lm-head", "--moe-dense-tp-size", "1"),
}
MAX_SECONDS = 1800
pytestmark = pytest.mark.timeout(MAX_SECONDS)


class Served:
    """What the requests of two ranks were given."""

    def __init__(self, report: Report) -> None:
        (other,) = report.other_ranks
        assert other.left_undone == []
        self.ranks = report, other

    def replies(self, wave: int) -> list[tuple[Prompts, Prompts]]:
        """By rank: the prompts of a wave and what became of them."""
        found = []
        for group, report in enumerate(self.ranks):
            first = sum(len(groups[group]) for groups in GROUPS[:wave])
            prompts = GROUPS[wave][group]
            found.append((prompts, report.tokens[first : first + len(prompts)]))
        return found

    def check_greedy(self, oracle: Oracle, *waves: int) -> None:
        for wave in waves:
            replies = self.replies(wave)
            prompts = [prompt for of_rank, _ in replies for prompt in of_rank]
            oracle.check_greedy(prompts, [output for _, of_rank in replies for output in of_rank])


def served_by_ranks(folder: Path, waves: Sequence[Any], *flags: str, **kwargs: Any) -> Served:
    every = (*TWO, *GRAPHS, *flags)
    return Served(served(folder, waves, every, FUSED_ATTENTION, timeout=MAX_SECONDS, **kwargs))


def served_by_mtp(folder: Path, waves: Sequence[Any], *flags: str, **kwargs: Any) -> Served:
    return served_by_ranks(folder, waves, *MTP, *SHORT_CONTEXT, *flags, **kwargs)


@pytest.fixture(scope="module", params=slow_but("shared-head", HEADS))
def head(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return HEADS[request.param]


@pytest.fixture(scope="module")
def plain(guessable, head) -> Served:
    return served_by_ranks(guessable, WAVES[: MIXED + 1], *head)


@pytest.fixture(scope="module")
def mtp(guessable, head) -> Served:
    return served_by_mtp(guessable, WAVES, *head)


def turns(report: Report, wave: int) -> list[Iteration]:
    return [turn for turn in report.iterations if turn.wave == wave]


def test_our_worker_and_backend_serve_in_both_ranks(mtp):
    for report in mtp.ranks:
        assert report.names["speculative_worker"] == "MTPWorker"
        assert report.names["attention"] == "NPUAttentionBackend"
        assert report.names["scheduler_loop"] == "overlap"


def test_mtp_has_transformers_tokens_and_keeps_some_drafts(mtp, exact):
    mtp.check_greedy(exact, UNEVEN, IDLE, LARGE, PREFILLS)
    assert all(tokens_per_step(report) > 1.1 for report in mtp.ranks)


def test_a_rank_without_requests_replays_the_graphs_of_the_other_s_step(mtp):
    idle, busy = (turns(report, IDLE) for report in mtp.ranks)
    steps = [turn.calls.get("graph_replays") for turn in busy]
    assert steps.count(2) > 3
    assert [turn.forward for turn in idle] == ["IDLE"] * len(steps)
    assert [turn.calls.get("graph_replays") for turn in idle] == steps


def test_a_step_is_two_graphs_which_hold_what_the_ranks_exchange(mtp):
    for report in mtp.ranks:
        for wave in (UNEVEN, IDLE, MIXED):
            for turn in decodes(report, wave):
                assert turn.calls["graph_replays"] == 2
                assert [name for name in turn.launched if name.startswith("Hccl")] == []


def test_ranks_gather_their_rows_and_scatter_the_sums(mtp):
    for report in mtp.ranks:
        assert report.collectives["all-gather"] > 0
        assert report.collectives["reduce-scatter"] > 0


def test_a_batch_that_a_graph_holds_goes_without_beside_one_that_none_does(mtp):
    of_one, of_three = (decodes(report, LARGE) for report in mtp.ranks)
    together = [turn for turn in of_three if turn.num_requests == 3]
    assert len(together) > 2
    for turn in (*together, *of_one[: len(together)]):
        assert "graph_replays" not in turn.calls


def test_a_rank_samples_beside_one_that_does_not(mtp, exact):
    ((prompt,), (output,)), (prompts, outputs) = mtp.replies(MIXED)
    assert exact.outside_nucleus(prompt, output, TEMPERATURE, TOP_P) == []
    assert exact.greedy(prompt, output).wrong
    exact.check_greedy(prompts, outputs)


def test_a_rank_that_decodes_goes_on_when_the_other_has_prefilled(mtp):
    decoding, prefilling = ([turn.forward for turn in turns(each, PREFILLS)] for each in mtp.ranks)
    first, last = decoding.index("DECODE"), len(decoding) - decoding[::-1].index("DECODE")
    assert "EXTEND" in prefilling[first:last]
    pairs = zip(decoding, prefilling, strict=True)
    assert {ours for ours, theirs in pairs if theirs == "EXTEND"} <= {"EXTEND", "IDLE"}


@pytest.mark.slow
def test_plain_decode_has_transformers_tokens(plain, exact):
    plain.check_greedy(exact, UNEVEN, IDLE)


@pytest.mark.slow
def test_no_rank_s_step_waits_for_more_than_its_results(mtp, plain):
    for ours, others in zip(mtp.ranks, plain.ranks, strict=True):
        for wave in (UNEVEN, MIXED):
            check_budget(ours.steady(wave), others.steady(wave))
    idle, busy = zip(mtp.ranks, plain.ranks, strict=True)
    check_budget(*(report.steady_without_requests(IDLE) for report in idle))
    check_budget(*(report.steady(IDLE) for report in busy))


@pytest.mark.slow
def test_nano_deepseek_s_step_keeps_its_budget_in_both_ranks():
    nano = model_path("nano-deepseek")
    first, *others = chat_prompts(nano, QUESTIONS)
    waves = [of_both(([first], others), num_tokens=24)]
    mtp, plain = served_by_mtp(nano, waves), served_by_ranks(nano, waves)
    for ours, theirs in zip(mtp.ranks, plain.ranks, strict=True):
        assert tokens_per_step(ours) > 1.1
        check_budget(ours.steady(), theirs.steady())


PARTING = {"skipped_drafts": IDLE, "own_choice_of_graph": UNEVEN}


@pytest.mark.parametrize("mistake", slow_but("skipped_drafts", PARTING))
def test_ranks_that_part_would_hang(guessable, mistake):
    """A rank without requests that leaves a forward out; ranks with one request and with two, each
    with the graph of its own."""
    process, report = start(
        guessable,
        [WAVES[PARTING[mistake]]],
        (*TWO, *GRAPHS, *MTP, *SHORT_CONTEXT),
        FUSED_ATTENTION,
        program=("npu_emulation.mutated_ranks", mistake),
        timeout=MAX_SECONDS,
    )
    assert report is None
    assert "a device would hang" in process.stderr


@pytest.mark.slow
def test_graphs_that_are_captured_as_a_prefill_is_run_sum_the_rows_of_both(guessable):
    """Nothing but what ranks exchange shows it."""
    program = ("npu_emulation.mutated_ranks", "extend_mode_captured")
    mistaken = served_by_mtp(guessable, [WAVES[IDLE]], program=program)
    assert all("reduce-scatter" not in report.collectives for report in mistaken.ranks)
