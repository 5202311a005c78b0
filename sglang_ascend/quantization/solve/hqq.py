"""HQQ (half-quadratic quantization, Badri and Shaji 2023): zero points that suit the weights' bulk,
from the weights alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sglang_ascend.quantization.solve.rtn import Grid, per_block, rtn, spread
from sglang_ascend.quantization.weight import WEIGHT_ONLY, InputRule, QuantizedWeight

NORM = 0.7  # p of the error's norm: below 1 a few outliers may stay far off
FIRST_PENALTY, GROWTH, ITERATIONS = 10.0, 1.01, 20


def hqq(weight: Tensor, grid: Grid, input_rule: InputRule = WEIGHT_ONLY) -> QuantizedWeight:
    """Codes and real zero points with a small sum of |w - q|^p, at the scales of `grid`.

    The half-quadratic split alternates an error e, which is W - Q shrunk towards sparsity, and the
    zero points, the mean of code - (W - e) / scale over each block. It ends where the error grows.

    Raises:
        ValueError: a symmetric grid, which has no zero points.
    """
    if grid.symmetric:
        raise ValueError("hqq moves zero points: set symmetric to false")
    nearest = rtn(weight, grid, input_rule)
    block, shape, form = nearest.block, weight.shape, grid.number_format
    count = per_block(torch.ones_like(weight, dtype=torch.float64), block, "sum")
    values, scale = weight.double(), spread(nearest.scale.double(), block, shape)
    assert nearest.zero is not None
    zero = best_zero = nearest.zero.double()
    least, penalty = torch.inf, FIRST_PENALTY
    for _ in range(ITERATIONS):
        offset = spread(zero, block, shape)
        codes = form.encode(values / scale + offset).double()
        error = values - (codes - offset) * scale
        size = float(error.abs().mean())
        if size >= least:
            break
        least, best_zero = size, zero
        shrunk = error.sign() * (error.abs() - error.abs().pow(NORM - 1) / penalty).clamp_min(0)
        zero = per_block(codes - (values - shrunk) / scale, block, "sum") / count
        penalty *= GROWTH
    best_zero = best_zero.float()
    offset = spread(best_zero.double(), block, shape)
    return replace(nearest, codes=form.encode(values / scale + offset), zero=best_zero)
