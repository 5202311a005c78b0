"""A request's language follows the tokens that it emitted last, as sums in float64 say."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_ascend.speculative.vocabulary.file import DraftVocabulary, Language
from sglang_ascend.speculative.vocabulary.languages import (
    DECAY,
    HALF_LIFE,
    MIN_OTHER_SCRIPT,
    MIN_UNLISTED,
    LanguageTracker,
    evidence,
)

# Tokens 0-3 are of script 0, 4-7 of script 1, 8 is special.
SCRIPTS, SPECIAL = torch.tensor([0] * 4 + [1] * 4 + [2]), 2
A, B, NONE = 0, 1, 2


@pytest.fixture
def vocabulary() -> DraftVocabulary:
    a = Language("a", torch.tensor([0, 1]), torch.tensor([30, 10]))
    b = Language("b", torch.tensor([1, 4, 5]), torch.tensor([1, 10, 9]))
    return DraftVocabulary(torch.tensor([0, 1, 4, 5]), (a, b), SCRIPTS, SPECIAL)


def test_evidence_is_the_counted_share_and_a_remainder_by_script(vocabulary):
    table = evidence(vocabulary).double().exp()
    rest = MIN_UNLISTED / (1 + 3 * MIN_OTHER_SCRIPT)
    of_own, of_other = (rest * share / 4 for share in (1 + MIN_OTHER_SCRIPT, MIN_OTHER_SCRIPT))
    expected = [(1 - MIN_UNLISTED) * 30 / 40 + of_own, (1 - MIN_UNLISTED) * 10 / 40 + of_own]
    expected += [of_own] * 2 + [of_other] * 4 + [1.0]
    assert table[:, A].tolist() == pytest.approx(expected, rel=1e-5)
    assert table[:8, NONE].tolist() == pytest.approx([1 / 9] * 8)
    assert table[8].tolist() == [1.0, 1.0, 1.0]
    # Each column but for special tokens is a distribution, up to what its script 2 would have.
    assert table[:8].sum(0).tolist() == pytest.approx([1, 1, 8 / 9], abs=0.001)


def exact(table: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """float64 [languages + 1]: what token n from the end says counts DECAY^n."""
    total = torch.zeros(table.shape[1], dtype=torch.float64)
    for age, token in enumerate(reversed(tokens)):
        total += math.pow(DECAY, age) * table[token].double()
    return total


def test_the_sums_of_a_prompt_and_of_steps_are_exact(vocabulary):
    table, generator = evidence(vocabulary), torch.Generator().manual_seed(0)
    tracker, rows = LanguageTracker(table, 5, "cpu"), torch.tensor([3, 1])
    known = [[0, 1, 8, 4], [5]]
    tracker.restart(rows, known)
    for _ in range(40):
        tokens = torch.randint(9, (2, 4), generator=generator)
        kept = torch.randint(1, 5, (2,), generator=generator)
        tracker.advance(rows, tokens, kept)
        for row, num_kept, of in zip(tokens.tolist(), kept.tolist(), known, strict=True):
            of += row[:num_kept]
    for row, of in zip(rows.tolist(), known, strict=True):
        expected = exact(table, of)
        assert tracker._sums[row].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
        assert tracker.likeliest(torch.tensor([row])) == expected.argmax()
    assert not tracker._sums[[0, 2, 4]].any()


def test_a_reply_that_changes_its_language_is_followed_within_two_half_lives(vocabulary):
    tracker, row = LanguageTracker(evidence(vocabulary), 1, "cpu"), torch.tensor([0])
    tracker.restart(row, [[0, 1] * 50])
    assert tracker.likeliest(row) == A
    heard = []
    for token in (4, 5) * HALF_LIFE:
        tracker.advance(row, torch.tensor([[token]]), torch.tensor([1]))
        heard.append(int(tracker.likeliest(row)))
    assert heard[0] == A and heard[-1] == B
    # Text that no language lists; a special token changes nothing.
    tracker.restart(row, [[6, 7, 2, 3] * 30])
    assert tracker.likeliest(row) == NONE
    tracker.advance(row, torch.tensor([[8, 8]]), torch.tensor([2]))
    assert tracker.likeliest(row) == NONE


def test_an_empty_prompt_has_no_evidence(vocabulary):
    tracker = LanguageTracker(evidence(vocabulary), 1, "cpu")
    tracker.restart(torch.tensor([0]), [[]])
    assert not tracker._sums.any()
