"""Accepted drafts by position: against the drafts one by one, and when they are logged."""

from __future__ import annotations

import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ascend.speculative.acceptance_counts import AcceptanceCounts, accepted_by_position

K = 3


@given(st.integers(1, 15).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k)))))
def test_draft_k_is_accepted_where_at_least_k_are(case):
    num_drafts, accepted = case
    one_by_one = [[position <= kept for position in range(1, num_drafts + 1)] for kept in accepted]
    expected = [sum(row[k] for row in one_by_one) for k in range(num_drafts)]
    assert accepted_by_position(accepted, num_drafts) == expected


def test_a_line_covers_the_batches_since_the_last_one(caplog: pytest.LogCaptureFixture):
    told = []
    counts = AcceptanceCounts(K, 3, lambda drafted, accepted: told.append((drafted, accepted)))
    with caplog.at_level(logging.INFO):
        for step in ([3, 1], [], [0, 0], [2], [1, 1, 1, 1], [3], [0]):
            counts.record(step)
    assert told == [
        ([2, 2, 2], [2, 1, 1]),
        ([2, 2, 2], [0, 0, 0]),
        ([1, 1, 1], [1, 1, 0]),
        ([4, 4, 4], [4, 0, 0]),
        ([1, 1, 1], [1, 1, 1]),
        ([1, 1, 1], [0, 0, 0]),
    ]
    assert [re.findall(r"[\d.]*\d", message) for message in caplog.messages] == [
        ["0.60", "5", "0.40", "5", "0.20", "5"],
        ["0.83", "6", "0.17", "6", "0.17", "6"],
    ]


def test_steps_with_fewer_drafts_count_for_the_positions_that_they_have(
    caplog: pytest.LogCaptureFixture,
):
    told = []
    counts = AcceptanceCounts(K, 3, lambda drafted, accepted: told.append((drafted, accepted)))
    with caplog.at_level(logging.INFO):
        counts.record([1, 0], num_drafts=1)
        counts.record([0, 0], num_drafts=0)
        counts.record([3], num_drafts=2)  # its last draft, repeated at the chain's end, was right
    assert told == [([2, 0, 0], [1, 0, 0]), ([1, 1, 0], [1, 1, 0])]
    assert caplog.messages == ["Drafts accepted by position: 0.67 of 3, 1.00 of 1, none."]
