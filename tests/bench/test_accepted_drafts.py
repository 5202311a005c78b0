"""Acceptance from the histogram of a reply, counted here forward by forward."""

from __future__ import annotations

import pytest

from sglang_ascend.bench.figures.acceptance import Acceptance
from sglang_ascend.bench.figures.lookup import accepted_counts

# Drafts that each forward accepted, of 4.
ACCEPTED = [0, 2, 4, 0, 1, 4, 2, 0]
DETAILS = {
    "spec_verify_ct": len(ACCEPTED),
    "spec_num_proposed_drafts": 4 * len(ACCEPTED),
    "spec_correct_drafts_histogram": [3, 1, 2, 0, 2],
}


def test_length_and_shares_are_those_of_the_forwards():
    found = Acceptance.of_reply(DETAILS)
    assert found is not None
    assert found.length == 1 + sum(ACCEPTED) / len(ACCEPTED)
    for num_drafts in range(5):
        cut = [min(accepted, num_drafts) for accepted in ACCEPTED]
        assert found.length_of_first(num_drafts) == 1 + sum(cut) / len(cut)
    reached = [sum(accepted >= n for accepted in ACCEPTED) for n in range(5)]
    assert found.per_position == [reached[n + 1] / reached[n] for n in range(4)]


def test_positions_that_no_forward_reached_have_no_share():
    short = Acceptance.of_reply(DETAILS | {"spec_correct_drafts_histogram": [5, 3]})
    assert short is not None and short.num_drafts == 4
    assert short.per_position == [3 / 8, 0, None, None]


def test_a_sum_is_of_all_forwards():
    total = Acceptance((3, 1)) + Acceptance((1, 1, 2))
    assert total == Acceptance((4, 2, 2))


@pytest.mark.parametrize("details", [{}, {"spec_verify_ct": 0}])
def test_a_reply_without_forwards_has_no_acceptance(details):
    assert Acceptance.of_reply(details) is None


def test_a_shorter_chain_is_only_estimated_by_cutting_a_longer_one():
    """The same drafts, right or wrong at each token: a server with one draft a step reaches other
    tokens than one with two. Where every token's drafts are alike the cut is exact."""
    alternating = [[True, True], [True, True], [True, True], [False, False]] * 8

    def served(num_drafts: int, matches: list[list[bool]]) -> Acceptance:
        counts = accepted_counts([row[:num_drafts] for row in matches], 1)
        return Acceptance(tuple(counts.count(n) for n in range(num_drafts + 1)))

    two, one = served(2, alternating), served(1, alternating)
    assert two.length_of_first(1) != one.length
    alike = [[True, False]] * 32
    assert served(2, alike).length_of_first(1) == served(1, alike).length == 2
