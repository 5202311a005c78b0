"""GPTQ (arXiv 2210.17323): columns are rounded in turn, the later ones make up for the error."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ascend.quantization.solve.rtn import Grid, rtn
from sglang_ascend.quantization.weight import WEIGHT_ONLY, InputRule, QuantizedWeight

LAZY_COLUMNS = (
    128  # the columns behind are corrected once for so many: a product instead of a sweep
)


def gptq(
    weight: Tensor,
    hessian: Tensor,
    grid: Grid,
    input_rule: InputRule = WEIGHT_ONLY,
    damping: float = 0.01,
    act_order: bool = False,
    scale_search: bool = False,
) -> QuantizedWeight:
    """Codes with a small tr((W - Q) H (W - Q)^T), at the scales of `grid`, in float64.

    Each output row is a problem of its own, so a row that rounding to nearest serves better keeps
    that: the result is never worse than `rtn`.

    Args:
        weight: float [out, in].
        hessian: [in, in], X^T X of the calibration inputs X.
        grid: of blocks with one row. Scales of a group are fitted to the corrected weights when its
            first column is reached; with `act_order` to the original ones.
        damping: added to the diagonal, in units of its mean.
        act_order: round the columns in the order of falling diagonal.
        scale_search: pick each scale by the error, weighted with H's diagonal, not by the extremes.

    Raises:
        ValueError: blocks of several rows, or a Hessian of another size or with NaN or infinity.
    """
    columns = weight.shape[1]
    if grid.block[0] != 1:
        raise ValueError("GPTQ corrects each row by itself: give a grid whose blocks have one row")
    grid.check_searchable()
    if hessian.shape != (columns, columns) or not torch.isfinite(hessian).all():
        raise ValueError(f"GPTQ needs a finite Hessian [{columns}, {columns}] of the inputs")
    nearest = rtn(weight, grid, input_rule)
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else None
    greedy = _sweep(weight.double(), hessian.double(), grid, damping, order, nearest, scale_search)
    errors = [hessian_error(weight, found, hessian) for found in (greedy, nearest)]
    return rows_of(greedy, nearest, errors[0] <= errors[1])


def hessian_error(weight: Tensor, quantized: QuantizedWeight, hessian: Tensor) -> Tensor:
    """float64 [out]: (w - q) H (w - q)^T of each row, the squared error of its outputs."""
    error = weight.double() - quantized.factor().double()
    return ((error @ hessian.double()) * error).sum(1)


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Upper U with U^T U = (H + damping * mean(diag H) * I)^-1, float64 [in, in].

    Row j of U / U[j, j] is how the columns behind j best answer an error in column j.
    """
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    added = torch.where(diagonal > 0, 0.0, 1.0) + damping * torch.where(mean > 0, mean, 1.0)
    lower = torch.linalg.cholesky(hessian + torch.diag(added))
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)


def _sweep(
    weight: Tensor,
    hessian: Tensor,
    grid: Grid,
    damping: float,
    order: Tensor | None,
    nearest: QuantizedWeight,
    scale_search: bool,
) -> QuantizedWeight:
    """The greedy codes; every tensor inside is in the order of rounding."""
    num_rows, columns = weight.shape
    group = grid.block_of(weight)[1]
    place = torch.arange(columns) if order is None else order
    work, factor = weight[:, place], inverse_factor(hessian[place][:, place], damping)
    codes = torch.empty(num_rows, columns, dtype=grid.number_format.dtype)
    importance = hessian.diagonal() if scale_search else None
    scale, zero = (None if t is None else t.float() for t in grid.fit(weight, importance))
    assert scale is not None
    for start in range(0, columns, LAZY_COLUMNS):
        stop = min(start + LAZY_COLUMNS, columns)
        errors = torch.empty(num_rows, stop - start, dtype=torch.float64)
        for column in range(start, stop):
            index = int(place[column]) // group
            if order is None and column % group == 0 and group < columns:
                ahead = _corrected(
                    work, errors, factor, start, column, min(column + group, columns)
                )
                weights_of = None if importance is None else importance[column : column + group]
                fitted = Grid(grid.number_format, (1, None), grid.symmetric).fit(ahead, weights_of)
                scale[:, index : index + 1] = fitted[0].float()
                if zero is not None and fitted[1] is not None:
                    zero[:, index : index + 1] = fitted[1].float()
            one_scale = scale[:, index].double()
            one_zero = 0.0 if zero is None else zero[:, index].double()
            value = work[:, column]
            code = grid.number_format.encode(value / one_scale + one_zero)
            codes[:, place[column]] = code
            rounded = (grid.number_format.decode(code).double() - one_zero) * one_scale
            error = (value - rounded) / factor[column, column]
            errors[:, column - start] = error
            work[:, column + 1 : stop] -= error[:, None] * factor[column, column + 1 : stop]
        work[:, stop:] -= errors @ factor[start:stop, stop:]
    zero = None if zero is None else zero.to(torch.int32)
    return QuantizedWeight(
        codes, scale, zero, nearest.block, grid.number_format, nearest.input_rule
    )


def _corrected(
    work: Tensor, errors: Tensor, factor: Tensor, start: int, column: int, stop: int
) -> Tensor:
    """The weights of columns `column`..`stop` with all corrections so far: those past the lazy
    block's end have not received this block's yet."""
    values = work[:, column:stop].clone()
    behind = max(start + errors.shape[1], column)
    if stop > behind:
        done = errors[:, : column - start]
        values[:, behind - column :] -= done @ factor[start:column, behind:stop]
    return values


def rows_of(first: QuantizedWeight, second: QuantizedWeight, use_first: Tensor) -> QuantizedWeight:
    """The rows of `first` where `use_first` [out], else those of `second`; both of one shape."""

    def chosen(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(use_first[:, None], one.float(), other.float()).to(one.dtype)

    return QuantizedWeight(
        codes=chosen(first.codes, second.codes),
        scale=chosen(first.scale, second.scale),
        zero=None if first.zero is None or second.zero is None else chosen(first.zero, second.zero),
        block=first.block,
        number_format=first.number_format,
        input_rule=first.input_rule,
    )
