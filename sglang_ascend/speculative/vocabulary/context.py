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
    """Of the requests in each row of a pool what ``unlisted_context`` gives, as they emit tokens.

    A ring for each row. ``restart`` and ``extend`` do not synchronise.
    """

    def __init__(
        self,
        listed: torch.Tensor,
        vocab_size: int,
        num_rows: int,
        device: torch.device | str,
        most: int = MOST_UNLISTED,
    ) -> None:
        self._listed, self.most = listed, most
        self._is_unlisted = torch.ones(vocab_size, dtype=torch.bool, device=device)
        self._is_unlisted[listed.to(device)] = False
        # One more column takes what is not kept.
        self._ring = torch.zeros(num_rows, most + 1, dtype=torch.int64, device=device)
        self._num_written = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._ramp = torch.arange(most, device=device)

    def restart(self, row: int, known: Sequence[int]) -> None:
        """A request begins in this row, with the tokens that it has."""
        unlisted = unlisted_context(known, self._listed, self.most)
        self._ring[row, : len(unlisted)] = unlisted.to(self._ring.device)
        self._num_written[row] = len(unlisted)

    def extend(self, rows: torch.Tensor, tokens: torch.Tensor, num_kept: torch.Tensor) -> None:
        """The first ``num_kept`` (int [batch]) of ``tokens`` (int64 [batch, width]) are emitted."""
        is_emitted = torch.arange(tokens.shape[1], device=tokens.device) < num_kept[:, None]
        is_new = self._is_unlisted[tokens] & is_emitted
        written = self._num_written[rows][:, None] + is_new.cumsum(dim=1)
        places = torch.where(is_new, (written - 1) % self.most, self.most)
        self._ring[rows[:, None], places] = tokens
        self._num_written[rows] = written[:, -1]

    def of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All of the requests in ``rows``, int64 [n] each: places in ``rows``, and tokens.

        Synchronises, for their number is known on the device.
        """
        is_held = self._ramp < self._num_written[rows, None]
        return is_held.nonzero()[:, 0], self._ring[rows, :-1][is_held]
