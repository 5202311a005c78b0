"""The watchdog speaks when acceptance is impossible, within a window, never for a healthy draft.

Confidence bounds are compared with exact binomial sums; streams of drafts are drawn at random.
"""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import islice
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ascend.speculative import acceptance_watchdog as module
from sglang_ascend.speculative.acceptance_watchdog import (
    COLLAPSED,
    MIN_REQUESTS,
    PERFECT,
    QUIET_S,
    RARE,
    RISK,
    WINDOW,
    AcceptanceWatchdog,
    decisive_counts,
)

K = 3


def at_most(count: int, num_steps: int, rate: Fraction) -> Fraction:
    """P(Binomial(num_steps, rate) <= count), exactly."""
    return sum(
        comb(num_steps, k) * rate**k * (1 - rate) ** (num_steps - k) for k in range(count + 1)
    )


@pytest.mark.parametrize("num_steps", [1, 50, 150])
@pytest.mark.parametrize(("rate", "risk"), [("1/50", "1/10000"), ("1/4", "1/100"), ("9/10", "1/3")])
def test_counts_are_decisive_exactly_where_the_binomial_says(num_steps, rate, risk):
    exact_rate, exact_risk = Fraction(rate), Fraction(risk)
    below, above = decisive_counts(num_steps, float(exact_rate), float(exact_risk))
    sums = [at_most(k, num_steps, exact_rate) for k in range(num_steps + 1)]
    assert below == max((k for k, p in enumerate(sums) if p < exact_risk), default=-1)
    at_least = [1 - p for p in [0, *sums[:-1]]]
    assert above == min(
        (k for k, p in enumerate(at_least) if p < exact_risk), default=num_steps + 1
    )


@pytest.mark.parametrize("rate", RARE.values())
def test_a_window_is_long_enough_to_call_an_event_rare_and_to_forgive_a_few(rate):
    below, above = decisive_counts(WINDOW, rate, RISK)
    assert 3 <= below < rate * WINDOW < above


def test_a_healthy_draft_is_called_collapsed_less_than_once_in_1e15_windows():
    below, _ = decisive_counts(WINDOW, RARE[COLLAPSED], RISK)
    assert at_most(below, WINDOW, Fraction(1, 10)) < Fraction(1, 10**15)


def test_the_chance_hits_of_an_untrained_layer_do_not_hide_it():
    """0.6 % of draft 1, measured with nano-deepseek's layer replaced by noise."""
    below, _ = decisive_counts(WINDOW, RARE[COLLAPSED], RISK)
    assert at_most(below, WINDOW, Fraction(6, 1000)) > 1 - Fraction(1, 10**6)


def accepted_drafts(rate: float, seed: int, num_drafts: int = K) -> Iterator[int]:
    """Each draft is right with probability ``rate``, and counts until the first wrong one."""
    draws = random.Random(seed)
    while True:
        count = 0
        while count < num_drafts and draws.random() < rate:
            count += 1
        yield count


class Changes(AcceptanceWatchdog):
    """A watchdog that keeps what it was told to report."""

    def __init__(self, num_drafts: int = K) -> None:
        self.changes: list[tuple[str, bool]] = []
        self.now = 0.0
        super().__init__(num_drafts, self._keep, lambda: self.now)

    def _keep(self, kind: str, is_active: bool) -> None:
        assert self.is_active(kind) == is_active
        self.changes.append((kind, is_active))

    def feed(self, drafts: Iterable[int], num_rows: int, batch_size: int = 8) -> None:
        drafts = iter(drafts)
        for _ in range(0, num_rows, batch_size):
            self.record(list(islice(drafts, batch_size)))


def changes_of_healthy_drafts(rate: float, seed: int, num_drafts: int, batch_size: int) -> list:
    watchdog = Changes(num_drafts)
    watchdog.feed(accepted_drafts(rate, seed, num_drafts), 4 * WINDOW, batch_size)
    return watchdog.changes


@settings(max_examples=25)
@given(st.floats(0.1, 0.9), st.integers(0, 2**32), st.integers(1, 15), st.integers(4, 130))
def test_healthy_drafts_raise_no_alarm(rate, seed, num_drafts, batch_size):
    assert changes_of_healthy_drafts(rate, seed, num_drafts, batch_size) == []


@settings(max_examples=20)
@given(st.floats(0, 6e-3), st.integers(0, 2**32), st.integers(4, 130))
def test_drafts_that_stop_being_right_are_noticed_within_two_windows(rate, seed, batch_size):
    watchdog = Changes()
    watchdog.feed(accepted_drafts(0.6, seed), 3 * WINDOW, batch_size)
    watchdog.feed(accepted_drafts(rate, seed), 2 * WINDOW + batch_size, batch_size)
    assert watchdog.changes == [(COLLAPSED, True)]


@pytest.mark.parametrize("batch_size", [4, 7, 128, 2 * WINDOW])
def test_the_first_window_without_an_accepted_draft_is_enough(batch_size):
    watchdog = Changes()
    while not watchdog.changes:
        watchdog.feed([0] * batch_size, batch_size, batch_size)
    assert watchdog.changes == [(COLLAPSED, True)]
    assert WINDOW <= watchdog._totals.num_rows < WINDOW + batch_size


@pytest.mark.parametrize("num_drafts", [1, 3, 15])
def test_drafts_that_are_always_right_are_noticed(num_drafts):
    watchdog = Changes(num_drafts)
    watchdog.feed([num_drafts] * WINDOW, WINDOW)
    assert watchdog.changes == [(PERFECT, True)]


def test_a_rejection_in_fifty_steps_is_not_perfect():
    watchdog = Changes()
    watchdog.feed(([K] * 49 + [K - 1]) * WINDOW, 20 * WINDOW)
    assert watchdog.changes == []


def test_one_request_is_no_evidence_whatever_its_length():
    watchdog = Changes()
    watchdog.feed([0] * 10 * WINDOW, 10 * WINDOW, batch_size=1)
    assert watchdog.changes == []
    for _ in range(MIN_REQUESTS - 1):
        watchdog.request_finished()
        watchdog.record([0])
    assert watchdog.changes == [(COLLAPSED, True)]


def test_requests_that_finished_before_the_window_are_no_evidence():
    watchdog = Changes()
    for _ in range(MIN_REQUESTS):
        watchdog.request_finished()
    watchdog.feed([K] * WINDOW, WINDOW, batch_size=1)
    watchdog.feed([0] * 3 * WINDOW, 3 * WINDOW, batch_size=1)
    assert COLLAPSED not in dict(watchdog.changes)


def test_a_batch_without_requests_is_no_step():
    watchdog = Changes()
    watchdog.feed([0] * (WINDOW - 8), WINDOW - 8)
    for _ in range(WINDOW):
        watchdog.record([])
    assert watchdog.changes == []


def test_watching_needs_no_tensors():
    parts = ("acceptance_watchdog", "timeline", "trace_file")
    imports = "; ".join(f"import sglang_ascend.speculative.{part}" for part in parts)
    subprocess.run(
        [sys.executable, "-c", f"{imports}; import sys; assert 'torch' not in sys.modules"],
        check=True,
    )


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize(
    ("drafts", "remedy"),
    [(0, "check --speculative-draft-model-path"), (K, "without --speculative-algorithm")],
)
def test_an_alarm_is_one_sentence_with_its_remedy_and_recovery_one_line(caplog, drafts, remedy):
    caplog.set_level(logging.INFO)
    watchdog = Changes()
    watchdog.feed([drafts] * 5 * WINDOW, 5 * WINDOW)
    ((level, sentence),) = lines(caplog)
    assert level == logging.WARNING
    assert sentence.startswith(f"acceptance length {1 + drafts:.2f} (of 1 to 4) over 1024 drafted")
    assert remedy in sentence
    assert "\n" not in sentence and sentence.endswith(".") and ". " not in sentence
    caplog.clear()
    watchdog.feed(accepted_drafts(0.5, seed=1), 5 * WINDOW)
    ((level, sentence),) = lines(caplog)
    assert level == logging.INFO
    assert "no longer" in sentence
    assert [is_active for _, is_active in watchdog.changes] == [True, False]


def test_changes_are_all_counted_and_logged_once_in_a_while(caplog):
    caplog.set_level(logging.INFO)
    watchdog = Changes()
    for _ in range(4):
        watchdog.feed([0] * 2 * WINDOW, 2 * WINDOW)
        watchdog.feed([1] * 2 * WINDOW, 2 * WINDOW)
    assert watchdog.changes == [(COLLAPSED, True), (COLLAPSED, False)] * 4
    assert [level for level, _ in lines(caplog)] == [logging.WARNING, logging.INFO]
    watchdog.now = QUIET_S
    watchdog.feed([0] * 2 * WINDOW, 2 * WINDOW)
    assert [level for level, _ in lines(caplog)][2:] == [logging.WARNING]


def test_acceptance_near_the_boundary_does_not_flap():
    for rate in (0.02, 0.05, 0.08):
        watchdog = Changes()
        watchdog.feed(accepted_drafts(rate, seed=5), 40 * WINDOW)
        assert len(watchdog.changes) <= 2


# Broken on purpose: what the tests above must catch.


def test_a_bare_threshold_on_a_short_window_accuses_healthy_drafts(monkeypatch):
    monkeypatch.setattr(module, "WINDOW", 16)
    monkeypatch.setattr(module, "decisive_counts", lambda *args: (0, 1))
    assert changes_of_healthy_drafts(0.1, seed=1, num_drafts=K, batch_size=4) != []


def test_a_window_that_forgets_nothing_does_not_notice_in_time(monkeypatch):
    watchdog = Changes()
    watchdog.feed(accepted_drafts(0.6, seed=1), 3 * WINDOW)
    monkeypatch.setattr(module, "WINDOW", 10**9)
    watchdog.feed([0] * 3 * WINDOW, 3 * WINDOW)
    assert watchdog.changes == []
