"""Sequences packed into the rows of one forward; none attends to another."""

from __future__ import annotations

import torch

Tensor = torch.Tensor
PACK_ROWS = 1024


class Pack:
    """Whole sequences one behind the other, as the rows of one forward.

    Packed rows are no padding: every one of them counts in a statistic over a linear's inputs.
    """

    def __init__(self, tokens: list[Tensor]) -> None:
        self.tokens, self.lengths = torch.cat(tokens), [len(row) for row in tokens]
        number = torch.arange(len(tokens)).repeat_interleave(torch.tensor(self.lengths))
        self.mask = (number[:, None] == number).tril()[None, None]  # own sequence, own past
        self.positions = torch.cat([torch.arange(length) for length in self.lengths])[None]


def packed(tokens: list[Tensor]) -> list[Pack]:
    """Packs of about `PACK_ROWS` rows, in order."""
    groups: list[list[Tensor]] = [[]]
    for row in tokens:
        if groups[-1] and sum(map(len, groups[-1])) + len(row) > PACK_ROWS:
            groups.append([])
        groups[-1].append(row)
    return [Pack(group) for group in groups]
