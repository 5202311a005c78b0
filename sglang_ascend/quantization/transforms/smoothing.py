"""Smoothing: a linear's inputs are divided, column by column, by what multiplies its weights.

s = max|X|^alpha / max|W|^beta of each column; SmoothQuant (arXiv 2211.10438) has beta = 1 - alpha.
ModelSlim's FlexSmoothQuant searches both: alpha with beta = 1 - alpha, then beta with that alpha.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SHARES = [step / 20 for step in range(21)]
LEAST_SCALE = 1e-5

# [rows, columns] -> the same, rounded. Of inputs, which are divided by scales, these come second: a
# static rule depends on them.
Rounding = Callable[[Tensor], Tensor]
InputRounding = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Smoothing:
    """The columns' scales, float32 [in], and what they were found by.

    Attributes:
        loss: |q(X / s) q(W s)^T - X W^T| / |X W^T|, root mean squares.
    """

    scale: Tensor
    alpha: float
    beta: float
    loss: float


def smoothing_scale(
    inputs: Tensor, weights: Tensor, alpha: float, beta: float, exact: bool = False
) -> Tensor:
    """float32 [in] from the columns' largest magnitudes, their geometric mean 1.

    A column that is 0 in either keeps its scale of 1. With `exact` scales are powers of two, which
    every float format multiplies by without rounding.
    """
    used = (inputs > 0) & (weights > 0)
    ones = torch.ones_like(inputs, dtype=torch.float64)
    high, wide = (torch.where(used, v.double(), ones) for v in (inputs, weights))
    scale = (high.pow(alpha) / wide.pow(beta)).clamp_min(LEAST_SCALE)
    logs = torch.where(used, scale.log2(), torch.zeros_like(scale))
    logs = torch.where(used, logs - logs.sum() / used.sum().clamp_min(1), logs)
    return torch.exp2(logs.round() if exact else logs).float()


def search(
    inputs: Tensor,
    weight: Tensor,
    round_inputs: InputRounding,
    round_weight: Rounding,
    groups: Tensor | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    exact: bool = False,
    largest: Tensor | None = None,
) -> Smoothing:
    """The scales with the least error of the outputs X W^T, both sides rounded.

    Args:
        inputs: X [rows, in]; weight: W [out, in], of all linears that read X.
        groups: int64 [in]: columns with the same number get the same scale; None is none do.
        alpha, beta: given ones are not searched.
        largest: max|X| [in] where more rows than these were seen.
    """
    high = inputs.abs().amax(0) if largest is None else largest
    wide = weight.abs().amax(0)
    if groups is not None:
        high, wide = (_of_groups(values, groups) for values in (high, wide))
    wanted = inputs @ weight.T
    size = wanted.square().mean().sqrt().clamp_min(1e-30)

    def smoothed(alpha: float, beta: float) -> Smoothing:
        scale = smoothing_scale(high, wide, alpha, beta, exact)
        found = round_inputs(inputs / scale, scale) @ round_weight(weight * scale).T
        return Smoothing(scale, alpha, beta, float((found - wanted).square().mean().sqrt() / size))

    alphas = SHARES if alpha is None else [alpha]
    first = [smoothed(share, 1 - share if beta is None else beta) for share in alphas]
    best = min(first, key=lambda one: one.loss)
    betas = [share for share in SHARES if beta is None and share != best.beta]
    return min([best, *(smoothed(best.alpha, share) for share in betas)], key=lambda one: one.loss)


def _of_groups(values: Tensor, groups: Tensor) -> Tensor:
    """The largest of each group's values, at each of its columns."""
    most = values.new_zeros(int(groups.max()) + 1).scatter_reduce(0, groups, values, "amax")
    return most[groups]
