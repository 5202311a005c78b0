"""Thinking sections: who is in one, for how many tokens, and how a budget of them is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

OUTSIDE = -1


class Delimiters(NamedTuple):
    """The tokens that begin and end a thinking section."""

    start: int
    end: int


class ThinkingSections:
    """How long each request has been thinking, by row of the request pool.

    Kept on the device, because the host learns of a step's tokens after the next one is launched.
    """

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        self._delimiters = torch.zeros(num_rows, 2, dtype=torch.int64, device=device)
        self._length = torch.full((num_rows,), OUTSIDE, dtype=torch.int64, device=device)

    def restart(
        self, rows: torch.Tensor, delimiters: list[Delimiters], tokens: list[list[int]]
    ) -> None:
        """Requests begin, in ``rows`` of the pool (int [requests]), behind these tokens."""
        lengths = [_length_behind(*of) for of in zip(delimiters, tokens, strict=True)]
        for kept, values in ((self._delimiters, delimiters), (self._length, lengths)):
            kept[rows.long()] = torch.tensor(values).to(kept, non_blocking=True)

    def along(self, rows: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """int64 [batch, width]: tokens behind the start of the section that what follows candidate
        j is in; -1 outside of one.

        Args:
            rows: int [batch], of the pool.
            candidates: int64 [batch, width], the last emitted token, then the chain after it.
        """
        length, (start, end) = self._length[rows.long()], self._delimiters[rows.long()].unbind(1)
        columns = []
        for tokens in candidates.unbind(dim=1):
            length = torch.where(length == OUTSIDE, OUTSIDE, length + 1)
            length = length.masked_fill(tokens == start, 0).masked_fill(tokens == end, OUTSIDE)
            columns.append(length)
        return torch.stack(columns, dim=1)

    def commit(self, rows: torch.Tensor, along: torch.Tensor, accept_lens: torch.Tensor) -> None:
        """The first accept_lens candidates are emitted: ``along`` says where that leaves them."""
        last = (accept_lens.long() - 1)[:, None]
        self._length[rows.long()] = along.gather(1, last)[:, 0]


def _length_behind(delimiters: Delimiters, tokens: list[int]) -> int:
    for length, token in enumerate(reversed(tokens)):
        if token in delimiters:
            return length if token == delimiters.start else OUTSIDE
    return OUTSIDE


@dataclass(frozen=True)
class Budgets:
    """Of each request of a batch, int64 [batch]."""

    num_tokens: torch.Tensor  # that a section may have before it is ended
    new_line: torch.Tensor  # the token that comes before ``end``
    end: torch.Tensor

    def apply(self, logits: torch.Tensor, along: torch.Tensor, candidates: torch.Tensor) -> None:
        """Where a section has used its budget up, leaves a new line alone, and ``end`` behind one.

        Args:
            logits: float [batch, width, vocab_size], changed in place; row j is what follows
                candidate j.
            along: int64 [batch, width], of ``ThinkingSections.along``.
            candidates: int64 [batch, width].

        As SGLang 0.5.23's ``ThinkingBudgetLogitProcessor``, which is told of a reply's tokens a
        step late and repeats both there. Does not synchronise.
        """
        is_over = along >= self.num_tokens[:, None]
        behind_new_line = candidates == self.new_line[:, None]
        token = torch.where(behind_new_line, self.end[:, None], self.new_line[:, None])[..., None]
        is_over = is_over[..., None]
        allowed = logits.gather(2, token).masked_fill(is_over, 0.0)
        logits.masked_fill_(is_over, -torch.inf).scatter_(2, token, allowed)
