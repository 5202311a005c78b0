"""Tokens of a request's own prompt and reply, which it may draft although its list lacks them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Unlisted tokens, from a text's end, that are remembered: with a list of 3,072 fewer than 4,096.
MOST_UNLISTED = 512


def unlisted_context(
    tokens: Sequence[int] | torch.Tensor, listed: torch.Tensor, most: int = MOST_UNLISTED
) -> torch.Tensor:
    """The definition: int64, the last ``most`` of ``tokens`` that ``listed`` (int64) lacks.

    One that occurs again is there again: a draft is drawn once from what it may be.
    """
    given = torch.as_tensor(tokens, dtype=torch.int64)
    return given[torch.isin(given, listed, invert=True)][-most:]


class ContextTracker:
    """Of the requests in each row of a pool what ``unlisted_context`` gives.

    ``ops.chain.extend_context`` goes on with it as they emit tokens.
    """

    def __init__(
        self,
        listed: torch.Tensor,
        vocab_size: int,
        num_rows: int,
        device: torch.device | str,
        most: int = MOST_UNLISTED,
    ) -> None:
        self._listed = listed
        self.is_unlisted = torch.ones(vocab_size, dtype=torch.bool, device=device)
        self.is_unlisted[listed.to(device)] = False
        self.ring = torch.zeros(num_rows, most, dtype=torch.int64, device=device)
        self.num_written = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def restart(self, row: int, known: Sequence[int]) -> None:
        """A request begins in this row, with the tokens that it has."""
        unlisted = unlisted_context(known, self._listed, self.ring.shape[1])
        self.ring[row, : len(unlisted)] = unlisted.to(self.ring.device)
        self.num_written[row] = len(unlisted)
