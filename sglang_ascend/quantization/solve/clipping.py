"""Learned clipping (OmniQuant, arXiv 2308.13137): how much of its range each block gives up."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ascend.quantization.solve.gptq import hessian_error, rows_of
from sglang_ascend.quantization.solve.rtn import Grid, rtn, spread
from sglang_ascend.quantization.weight import WEIGHT_ONLY, InputRule, QuantizedWeight

STEPS, RATE = 60, 0.02


def learned_clipping(
    weight: Tensor, hessian: Tensor, grid: Grid, input_rule: InputRule = WEIGHT_ONLY
) -> QuantizedWeight:
    """Codes by rounding, at clipped ranges with a small tr((W - Q) H (W - Q)^T).

    The shares of the greatest and of the least value of each block are learned by Adam, with the
    gradient of rounding taken as 1, from the best single share of `grid`'s search on. A row keeps
    the best that any step found, so it is never worse than that search, nor than `rtn`.

    Args:
        weight: float [out, in].
        hessian: [in, in], X^T X of the calibration inputs X.
        grid: of blocks with one row, in an integer format.

    Raises:
        ValueError: blocks of several rows, or a format that is no integer.
    """
    if grid.block[0] != 1 or not grid.number_format.is_integer:
        raise ValueError("learned clipping is of integers, in blocks that have one row")
    # Quantization runs in inference mode, whose tensors have no gradients.
    with torch.inference_mode(False), torch.enable_grad():
        values, norm = weight.detach().double().clone(), hessian.detach().double().clone()
        searched = rtn(values, grid, input_rule, norm.diagonal())
        nearest = rtn(values, grid, input_rule)
        share = (searched.scale / nearest.scale).double().clamp(0.02, 0.98)
        logits = torch.logit(torch.stack((share, share))).requires_grad_()
        high, low = grid.range_of(values)
        optimizer = torch.optim.Adam([logits], lr=RATE)
        least = torch.full((len(values),), torch.inf, dtype=torch.float64)
        best = logits.detach().clone()
        for _ in range(STEPS):
            error = values - _through(values, grid, *_clipped(grid, logits, high, low))
            squared = ((error @ norm) * error).sum(1)
            best = torch.where((squared < least)[:, None], logits.detach(), best)
            least = torch.minimum(squared.detach(), least)
            optimizer.zero_grad()
            (squared / least.clamp_min(1e-30)).sum().backward()
            optimizer.step()
        found = grid.quantized(values, *_clipped(grid, best, high, low), input_rule)
    return _best(values, norm, _best(values, norm, found, searched), nearest)


def _clipped(grid: Grid, logits: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scale and zero of the shares that `logits` [2, ...] are of; a zero has no gradient."""
    upper, lower = logits.sigmoid()
    scale, zero = grid.scaled(high * upper, low * lower)
    return scale, None if zero is None else zero.detach()


def _best(
    weight: Tensor, hessian: Tensor, first: QuantizedWeight, second: QuantizedWeight
) -> QuantizedWeight:
    """Row by row, with the least error."""
    errors = [hessian_error(weight, found, hessian) for found in (first, second)]
    return rows_of(first, second, errors[0] < errors[1])


def _through(weight: Tensor, grid: Grid, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The rounded weight, with a gradient as if codes were not rounded."""
    block, form = grid.block_of(weight), grid.number_format
    wide = spread(scale, block, weight.shape)
    offset = 0.0 if zero is None else spread(zero, block, weight.shape)
    exact = weight / wide + offset
    codes = exact + (exact.round() - exact).detach()
    return (codes.clamp(form.minimum, form.maximum) - offset) * wide
