"""Rotation leaves a product as it is and spreads a channel; tables err less than even steps."""

import packers
import pytest
import torch

from sglang_ascend.quantization.formats import INT3
from sglang_ascend.quantization.solve import Grid, rtn
from sglang_ascend.quantization.solve.lut import decoded, kmeans
from sglang_ascend.quantization.transforms.rotation import rotated


@pytest.mark.parametrize("size", [1, 7, 64, 88, 96, 240, 576])
def test_a_rotation_is_orthogonal_and_leaves_a_product_as_it_is(size):
    matrix, generator = rotated(torch.eye(size).double()), torch.Generator().manual_seed(size)
    x, w = (torch.randn(5, size, dtype=torch.float64, generator=generator) for _ in range(2))
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(rotated(x), x @ torch.tensor(packers.rotation(size)), atol=1e-12)
    assert torch.allclose(rotated(x) @ rotated(w).T, x @ w.T, atol=1e-12)
    assert torch.allclose(rotated(rotated(x), back=True), x, atol=1e-12)
    # The control: only the inputs are rotated. Of size 1 the rotation is 1.
    assert torch.allclose(rotated(x) @ w.T, x @ w.T, atol=1e-3) == (size == 1)


def test_a_rotation_spreads_one_channel_over_all():
    for place in (0, 100, 575):
        spread = rotated(torch.eye(576)[place])
        assert float(spread.abs().max()) <= (2 / 576) ** 0.5 + 1e-6
        assert int((spread.abs() > 1e-6).sum()) == 576


def test_tables_are_where_no_code_and_no_mean_moves_and_err_less_than_even_steps():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 256, generator=generator)
    importance = torch.rand(256, generator=generator) + 0.1
    codes, tables = kmeans(weight, 3, importance)
    found = decoded(codes, tables)
    for row in range(8):  # by hand: each weight at its nearest number
        gaps = (weight[row].double()[:, None] - tables[row].double()).abs()
        chosen = gaps.gather(1, codes[row].long()[:, None])[:, 0]
        assert torch.equal(chosen, gaps.min(1).values)

    def error(values: torch.Tensor) -> float:
        return float(((weight - values).square() * importance).sum())

    steps = rtn(weight, Grid(INT3, (1, None), symmetric=False)).dequantize()
    unweighted = decoded(*kmeans(weight, 3, torch.ones(256)))
    assert error(found) < error(unweighted) < error(steps)
