"""Invariant: a draft is judged by what it was drawn from, and by nothing where it was not drawn."""

from __future__ import annotations

import torch

from sglang_ascend.speculative.drawn import DrawnDrafts

ROWS = torch.tensor([4, 1])


def chains(value: float, num_drafts: int) -> torch.Tensor:
    return torch.full((2, num_drafts, 5), value)


def test_each_request_finds_its_own_wherever_it_stands_in_the_batch():
    drawn = DrawnDrafts(6, 3, "cpu")
    assert drawn.of(ROWS, 3) is None
    drawn.keep(ROWS, torch.stack([chains(0.1, 3)[0], chains(0.2, 3)[0]]))
    drawn.keep(torch.tensor([2]), chains(0.3, 3)[:1])
    found = drawn.of(torch.tensor([2, 1, 4]), 3)
    assert found[:, 0, 0].tolist() == torch.tensor([0.3, 0.2, 0.1]).tolist()


def test_what_was_not_drawn_has_no_distribution():
    """Behind a prompt; in a chain shorter or longer than what was drawn; in a row never used."""
    drawn = DrawnDrafts(6, 3, "cpu")
    drawn.keep(ROWS, chains(0.5, 3))
    drawn.keep(ROWS[:1], None)
    drawn.keep(ROWS[1:], chains(0.25, 1)[:1])
    found = drawn.of(torch.tensor([4, 1, 3]), 3)
    assert not found[0].any() and not found[2].any()
    assert (found[1, 0] == 0.25).all() and not found[1, 1:].any()
    assert drawn.of(ROWS, 5).shape == (2, 5, 5)
    assert not drawn.of(ROWS, 5)[:, 3:].any()
