"""Definition of the greedy draw."""

from __future__ import annotations

import torch


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row, the first of equals: [rows, vocab_size] -> int64 [rows].

    Does not synchronise.
    """
    return logits.argmax(dim=-1)
