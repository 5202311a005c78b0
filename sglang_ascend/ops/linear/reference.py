"""Definitions of a linear layer whose weight was prepared once, and of one of each head's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PreparedWeight:
    """A weight and what an implementation made of it (opaque; None: the reference serves it)."""

    dense: torch.Tensor  # [output_size, input_size]
    packed: torch.Tensor | None = None
    rows: torch.Tensor | None = None  # [output_size, input_size]
    most_rows: int = 0  # of an input that ``rows`` is multiplied by; others go to ``packed``


def prepare(weight: torch.Tensor) -> PreparedWeight:
    """A view of ``weight`` ([output_size, input_size]): no copy. Call it again after a change."""
    return PreparedWeight(weight)


def linear(
    x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b: [..., input_size] -> [..., output_size] in the dtype of x. Does not synchronise.

    Args:
        x: [..., input_size], in the dtype of the weight.
        weight: what ``prepare`` returned on this device.
        bias: [output_size], or None.
    """
    return torch.nn.functional.linear(x, weight.dense, bias)


def by_head(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x_h W_h of each head: latent attention takes queries to the latent space, and values back.

    Args:
        x: float [rows, heads, in_width].
        weights: [heads, in_width, out_width] in the dtype of ``x``.

    Returns:
        [rows, heads, out_width] in the dtype of ``x``. Does not synchronise.
    """
    return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)
