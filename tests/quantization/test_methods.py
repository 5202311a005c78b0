"""Each solver gains over rounding to nearest on what it minimizes, and QoQ is its integers computed
one by one. A broken solver, or statistics of other inputs, loses the gain."""

import numpy as np
import pytest
import torch
from test_solve import correlated, drawn

from sglang_ascend.quantization.formats import FP8_E4M3, INT2, INT3, INT4
from sglang_ascend.quantization.solve import (
    Grid,
    gptq,
    hessian_error,
    hqq,
    learned_clipping,
    qoq,
    rtn,
)
from sglang_ascend.quantization.solve.qoq import PROTECTED

ASYMMETRIC = [Grid(form, (1, 8), symmetric=False) for form in (INT2, INT3, INT4)]
GRIDS = [Grid(INT4), Grid(INT2, (1, 8)), *ASYMMETRIC]


def heavy_tailed(seed: int) -> torch.Tensor:
    return drawn(24, 64, seed) + 4 * (drawn(24, 64, seed + 50) / 3) ** 3


def name(grid: Grid) -> str:
    return f"{grid.number_format.name}{'' if grid.symmetric else ' asymmetric'}"


def norm_of(weight, found) -> float:
    return float((weight - found.dequantize()).abs().pow(0.7).sum())


@pytest.mark.parametrize("grid", ASYMMETRIC, ids=name)
@pytest.mark.parametrize("seed", range(3))
def test_hqq_has_a_smaller_norm_of_the_error_than_rounding(grid, seed):
    weight = heavy_tailed(seed)
    found = hqq(weight, grid)
    assert norm_of(weight, found) < 0.97 * norm_of(weight, rtn(weight, grid))
    assert found.zero is not None and found.zero.is_floating_point()
    assert torch.equal(found.scale, rtn(weight, grid).scale)
    moved = found.zero.roll(1, 0)  # the control: zero points of another row
    offset = moved.repeat_interleave(8, 1)
    wide = found.scale.repeat_interleave(8, 1)
    codes = grid.number_format.encode(weight / wide + offset)
    other = (codes - offset) * wide
    assert float((weight - other).abs().pow(0.7).sum()) > norm_of(weight, found)


def test_hqq_keeps_what_is_on_the_grid_and_needs_zero_points():
    grid = Grid(INT4, (1, 8), symmetric=False)
    exact = rtn(drawn(6, 24), grid).dequantize()
    assert (hqq(exact, grid).dequantize() - exact).abs().max() < 1e-5
    with pytest.raises(ValueError, match="hqq moves zero points"):
        hqq(exact, Grid(INT4))


@pytest.mark.parametrize("grid", GRIDS, ids=name)
def test_learned_clipping_is_in_no_row_worse_than_the_best_search_and_better_on_the_whole(grid):
    weight, hessian = heavy_tailed(0), correlated(64)
    searched = rtn(weight, grid, importance=hessian.diagonal())
    found = learned_clipping(weight, hessian, grid)
    errors = hessian_error(weight, found, hessian)
    for other in (searched, rtn(weight, grid)):
        assert (errors <= hessian_error(weight, other, hessian) * (1 + 1e-9)).all()
    assert errors.sum() < 0.9 * hessian_error(weight, searched, hessian).sum()
    with torch.inference_mode():  # as `quantize` calls it
        again = learned_clipping(weight.clone(), hessian.clone(), grid)
    assert torch.equal(again.codes, found.codes) and torch.equal(again.scale, found.scale)


def test_learned_clipping_refuses_what_it_cannot_do():
    for grid in (Grid(INT4, (4, 8)), Grid(FP8_E4M3)):
        with pytest.raises(ValueError, match="of integers, in blocks that have one row"):
            learned_clipping(drawn(8, 16), correlated(16), grid)


@pytest.mark.parametrize("solve", [gptq, learned_clipping], ids=lambda solve: solve.__name__)
@pytest.mark.parametrize("grid", [Grid(INT4), Grid(INT2, (1, 8), symmetric=False)], ids=name)
def test_shuffled_statistics_lose_the_gain(solve, grid):
    """The columns of the Hessian in an order that is not the weight's."""
    weight, hessian = drawn(24, 64), correlated(64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    shuffled = hessian[order][:, order]
    error, misled, nearest = (
        hessian_error(weight, found, hessian).sum()
        for found in (
            solve(weight, hessian, grid),
            solve(weight, shuffled, grid),
            rtn(weight, grid),
        )
    )
    assert error < 0.9 * nearest and error < 0.9 * misled


def by_hand(row: list[float], group_size: int) -> tuple[list[int], list[int], float]:
    """(int4 codes from 0, their int8, first scale) of one row, by the paper's equations."""
    first = float(np.float32(max(map(abs, row)) / 119)) or 1.0
    eights = [round(value / first) for value in row]
    fours, expanded = [], []
    for start in range(0, len(row), group_size):
        part = eights[start : start + group_size]
        second = max(1, round((max(part) - min(part)) / 15))
        zero = round(-min(part) / second)
        codes = [min(15, max(0, round(code / second) + zero)) for code in part]
        fours += codes
        expanded += [(code - zero) * second for code in codes]
    return fours, expanded, first


@pytest.mark.parametrize("columns", [64, 40])
def test_qoq_is_its_integers_computed_one_by_one(columns):
    weight = drawn(10, columns)
    weight[2] = 0
    weight[3] = weight[3].abs() + 1
    grouped, expanded = qoq(weight, 16)
    for row in range(10):
        fours, eights, first = by_hand(weight[row].double().tolist(), 16)
        assert (grouped.codes[row].int() + 8).tolist() == fours
        assert expanded.codes[row].tolist() == eights
        assert float(expanded.scale[row, 0]) == pytest.approx(first)
    same = grouped.dequantize() - expanded.dequantize()
    assert same.abs().max() <= 1e-6 * weight.abs().max()
    other, _ = qoq(weight.roll(1, 1), 16)  # the control: columns off by one
    assert not torch.equal(other.codes, grouped.codes)


def worst(protected: int) -> int:
    """The greatest magnitude that any group whose codes span any range expands to."""
    low, high = np.meshgrid(np.arange(-protected, 1), np.arange(0, protected + 1))
    low, high = low.ravel(), high.ravel()
    second = np.maximum(1, np.round((high - low) / 15))
    zero = np.round(-low / second)
    ends = [np.clip(np.round(end / second) + zero, 0, 15) - zero for end in (low, high)]
    return int(max(np.abs(end * second).max() for end in ends))


def test_what_qoq_expands_never_leaves_int8_for_its_range_alone():
    assert worst(PROTECTED) <= 127
    assert worst(127) > 127  # the control: the whole range of the first step
