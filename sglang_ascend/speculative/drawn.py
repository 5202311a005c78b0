"""What the drafts of a chain were drawn from, as rejection sampling asks."""

from __future__ import annotations

import torch


def with_certain(probs: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """q of each draft, in place: ``probs`` float [batch, K, vocab_size] is 0 throughout for a draft
    of ``drafts`` int64 [batch, K] that was not drawn, and what was drawn has a probability.

    A draft that was not drawn has a point mass. It is kept with probability p(draft), and what
    comes in its place is drawn from p without it.
    """
    drafted = drafts[..., None]
    return probs.scatter_add_(-1, drafted, (probs.gather(-1, drafted) == 0).to(probs.dtype))


class DrawnDrafts:
    """What the next drafts of each request were drawn from, and how many were: behind a prompt, in
    a chain that is longer than what was drafted, and where it was looked up, others stand that
    were not drawn.

    Args:
        num_rows: requests that there may be; each has a row.
        num_drafts: of the longest chain that is drafted.
    """

    def __init__(self, num_rows: int, num_drafts: int, device: torch.device | str) -> None:
        self.shape, self.device = (num_rows, num_drafts), device
        self.probs: torch.Tensor | None = None
        self.num_drawn = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def keep(self, rows: torch.Tensor, probs: torch.Tensor | None) -> None:
        """``probs`` float [batch, K, tokens that a draft can be] of the requests in int64 ``rows``
        [batch]; None for chains of which nothing was drawn. Does not synchronise."""
        if probs is not None:
            if self.probs is None:
                self.probs = torch.zeros(*self.shape, probs.shape[-1], device=self.device)
            self.probs[rows, : probs.shape[1]] = probs
        if self.probs is not None:
            self.num_drawn[rows] = 0 if probs is None else probs.shape[1]

    def of(self, rows: torch.Tensor, width: int) -> torch.Tensor | None:
        """float [batch, width, tokens that a draft can be]: 0 for drafts that were not drawn; None
        where none ever was."""
        if self.probs is None:
            return None
        probs = self.probs[rows, :width]
        places = torch.arange(probs.shape[1], device=probs.device)
        probs.mul_((places < self.num_drawn[rows, None])[..., None])
        # A lookup may be longer than what the MTP layer drafts.
        return torch.nn.functional.pad(probs, (0, 0, 0, width - probs.shape[1]))
