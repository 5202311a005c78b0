"""RTN is the direct formula in float64; GPTQ is the greedy order solved by brute force, and in the
Hessian's norm it is never worse than RTN. Each claim has a broken solver that fails it."""

from itertools import product

import numpy as np
import pytest
import torch

from sglang_ascend.quantization.formats import FP8_E4M3, INT2, INT4, INT8
from sglang_ascend.quantization.solve import Grid, gptq, hessian_error, rtn

GRIDS = [
    Grid(INT8),
    Grid(INT4, (1, None), symmetric=False),
    Grid(INT4, (1, 8)),
    Grid(INT4, (1, 8), symmetric=False),
    Grid(INT2, (1, 8), symmetric=False),
]
BLOCK_GRIDS = [Grid(INT8, (4, 8)), Grid(INT8, (None, None)), Grid(INT4, (3, 16), symmetric=False)]


def name(grid: Grid) -> str:
    sign = "symmetric" if grid.symmetric else "asymmetric"
    return f"{grid.number_format.name}-{grid.block}-{sign}"


def drawn(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 3 + 0.5


def correlated(columns: int, seed: int = 0, samples: int = 200) -> torch.Tensor:
    """X^T X of inputs whose columns lean on each other, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(samples, 3, generator=generator) @ torch.randn(
        3, columns, generator=generator
    )
    inputs = (common + 0.5 * torch.randn(samples, columns, generator=generator)).double()
    return inputs.T @ inputs


def direct_rtn(weight: torch.Tensor, grid: Grid) -> np.ndarray:
    """What a reader of the definition would write: block by block, value by value, in float64."""
    values, result = weight.double().numpy(), np.zeros(weight.shape)
    low_code, high_code = grid.number_format.minimum, grid.number_format.maximum
    rows, columns = grid.block_of(weight)
    for r in range(0, weight.shape[0], rows):
        for c in range(0, weight.shape[1], columns):
            block = values[r : r + rows, c : c + columns]
            zero = 0.0
            if grid.symmetric:
                scale = np.float32(np.abs(block).max() / high_code)
            else:
                low, high = min(block.min(), 0.0), max(block.max(), 0.0)
                exact = (high - low) / (high_code - low_code)
                scale, zero = np.float32(exact), np.round(low_code - low / exact)
            codes = np.clip(np.round(block / np.float64(scale) + zero), low_code, high_code)
            result[r : r + rows, c : c + columns] = (codes - zero) * np.float64(scale)
    return result


@pytest.mark.parametrize("grid", [*GRIDS, *BLOCK_GRIDS], ids=name)
def test_rounding_to_nearest_is_the_direct_formula_also_in_cut_blocks(grid):
    weight = drawn(10, 27)
    found = rtn(weight, grid).dequantize().numpy()
    assert np.abs(found - direct_rtn(weight, grid)).max() < 1e-5
    shifted = rtn(weight.roll(1, 1), grid).dequantize().numpy()  # the control: columns off by one
    assert np.abs(shifted - direct_rtn(weight, grid)).max() > 0.1


def test_fp8_blocks_hold_the_nearest_fp8_number_of_each_scaled_value():
    weight = drawn(10, 27)
    found = rtn(weight, Grid(FP8_E4M3, (4, 8)))
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = numbers[torch.isfinite(numbers)]
    scale = found.scale.double().repeat_interleave(4, 0)[:10].repeat_interleave(8, 1)[:, :27]
    best = (weight.double() / scale)[..., None].sub(numbers).abs().amin(-1)
    assert torch.equal((weight.double() / scale - found.codes.double()).abs(), best)
    other = found.codes.view(torch.uint8).bitwise_xor(1).view(torch.float8_e4m3fn)  # the control
    assert not torch.equal((weight.double() / scale - other.double()).abs(), best)


def test_a_block_of_zeros_stays_zero_and_zero_is_exact_without_symmetry():
    weight = drawn(4, 16).abs() + 1
    weight[0] = 0
    for grid in GRIDS:
        found = rtn(weight, grid).dequantize()
        assert torch.equal(found[0], torch.zeros(16))
    weight[1, 3] = 0
    assert rtn(weight, Grid(INT4, (1, 8), symmetric=False)).dequantize()[1, 3] == 0


def test_only_integers_have_a_zero_point():
    with pytest.raises(ValueError, match="fp8_e4m3 has no zero point"):
        Grid(FP8_E4M3, (128, 128), symmetric=False)


@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act order"])
@pytest.mark.parametrize("grid", GRIDS, ids=name)
@pytest.mark.parametrize("seed", range(3))
def test_gptq_is_never_worse_than_rounding_in_any_row_and_better_on_the_whole(
    grid, act_order, seed
):
    weight, hessian = drawn(24, 40, seed), correlated(40, seed)
    nearest = hessian_error(weight, rtn(weight, grid), hessian)
    found = hessian_error(weight, gptq(weight, hessian, grid, act_order=act_order), hessian)
    assert (found <= nearest).all()
    assert found.sum() < 0.8 * nearest.sum()


def test_a_hessian_of_other_inputs_loses_the_gain():
    """The control of the test above: the gain comes from the Hessian and from nothing else."""
    weight, hessian, other = drawn(24, 40), correlated(40), correlated(40, seed=9)
    nearest = hessian_error(weight, rtn(weight, Grid(INT4)), hessian).sum()
    assert hessian_error(weight, gptq(weight, other, Grid(INT4)), hessian).sum() > nearest


def greedy_by_least_squares(
    weight: torch.Tensor, hessian: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """Column by column: the best real values of the columns that are left, by least squares from
    scratch, then the first of them rounded. No Cholesky factor, no running correction."""
    scale = rtn(weight, grid).scale.double()
    target = weight.double()
    fixed = torch.zeros_like(target)
    for column in range(target.shape[1]):
        error = (target - fixed)[:, :column]
        left = hessian[column:, column:]
        pulled = torch.linalg.solve(left, hessian[column:, :column] @ error.T).T
        wanted = target[:, column:] + pulled
        code = grid.number_format.encode(wanted[:, 0] / scale[:, 0])
        fixed[:, column] = code.double() * scale[:, 0]
    return fixed


@pytest.mark.parametrize("seed", range(5))
def test_gptq_is_the_greedy_order_solved_by_least_squares(seed):
    weight, hessian, grid = drawn(6, 200, seed), correlated(200, seed, samples=400), Grid(INT4)
    expected = greedy_by_least_squares(weight, hessian, grid)
    errors = ((weight - expected) @ hessian * (weight - expected)).sum(1)
    better = errors < hessian_error(weight, rtn(weight, grid), hessian)
    assert better.any()
    found = gptq(weight, hessian, grid, damping=0.0).dequantize().double()
    assert (found - expected)[better].abs().max() < 1e-5
    damped = gptq(weight, hessian, grid, damping=10.0).dequantize().double()  # the control
    assert (damped - expected)[better].abs().max() > 0.1


DECISIVE = torch.tensor([[50.0, 6.0, 0.0], [6.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)


def three_columns(seed: int) -> torch.Tensor:
    """The last column sets the scale, so that no code of the others saturates."""
    weight = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    weight[:, 2] = 2.0
    return weight


def best_of_all_codes(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes = torch.tensor(list(product(range(-8, 8), repeat=3)), dtype=torch.float64)
    errors = weight.double()[:, None] - codes * scale.double()[:, None]
    return ((errors @ DECISIVE) * errors).sum(-1).amin(1)


@pytest.mark.parametrize("seed", range(8))
def test_gptq_is_the_best_of_all_codes_where_the_first_column_decides(seed):
    """The first column is far heavier: its best code is the nearest, and the second's best code
    answers its error. Brute force over all 4096 rows of codes finds the same."""
    weight = three_columns(seed)
    found = gptq(weight, DECISIVE, Grid(INT4), damping=0.0)
    best = best_of_all_codes(weight, found.scale)
    assert torch.allclose(hessian_error(weight, found, DECISIVE), best, rtol=1e-3)


def test_rounding_is_not_the_best_of_all_codes_on_those_cases():
    """The control: a solver that rounds to nearest would have failed."""
    worse = 0
    for seed in range(8):
        weight = three_columns(seed)
        nearest = rtn(weight, Grid(INT4))
        best = best_of_all_codes(weight, nearest.scale)
        worse += int((hessian_error(weight, nearest, DECISIVE) > 1.1 * best).sum())
    assert worse > 16


@pytest.mark.parametrize("grid", [GRIDS[1], GRIDS[2], BLOCK_GRIDS[2]], ids=name)
def test_a_searched_scale_is_the_best_of_its_candidates_in_every_block(grid):
    weight, importance = drawn(10, 27).double(), torch.rand(27, dtype=torch.float64) + 0.1
    scale, zero = grid.fit(weight, importance)
    rows, columns = grid.block_of(weight)

    def costs(values):
        error = (weight - values).square() * importance
        bands = [band.split(columns, 1) for band in error.split(rows)]
        return torch.tensor([[block.sum() for block in band] for band in bands])

    found = costs(grid.rounded(weight, scale, zero))
    for shrink in (1.0, 0.9, 0.8, 0.7, 0.6):
        low, high = weight * 0, weight * 0
        for r in range(0, 10, rows):
            for c in range(0, 27, columns):
                block = weight[r : r + rows, c : c + columns]
                high[r : r + rows, c : c + columns] = block.max().clamp_min(0) * shrink
                low[r : r + rows, c : c + columns] = block.min().clamp_max(0) * shrink
        span = (high - low) / (2**grid.number_format.bits - 1)
        offset = (grid.number_format.minimum - low / span).round()
        if grid.symmetric:
            span, offset = torch.maximum(high, -low) / grid.number_format.maximum, 0 * span
        codes = grid.number_format.encode(weight / span + offset).double()
        assert (found <= costs((codes - offset) * span) + 1e-9).all()
    widest = costs(grid.rounded(weight, *grid.fit(weight)))  # the control: no search
    assert (widest > 1.01 * found).any()


def test_columns_that_were_never_excited_do_no_harm():
    weight, hessian = drawn(6, 16), correlated(16)
    hessian[3] = hessian[:, 3] = 0
    found = gptq(weight, hessian, Grid(INT4))
    assert torch.isfinite(found.dequantize()).all()
    nothing = gptq(weight, torch.zeros(16, 16), Grid(INT4))
    assert torch.equal(nothing.codes, rtn(weight, Grid(INT4)).codes)


def test_gptq_refuses_what_it_cannot_solve():
    with pytest.raises(ValueError, match="blocks have one row"):
        gptq(drawn(4, 8), correlated(8), Grid(INT8, (2, 4)))
    with pytest.raises(ValueError, match=r"finite Hessian \[8, 8\]"):
        gptq(drawn(4, 8), correlated(8) * torch.nan, Grid(INT8))
