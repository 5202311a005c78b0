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
