"""Rotation leaves a product as it is and spreads a channel; tables err less than even steps."""

import pytest
import torch

from sglang_ascend.quantization.formats import INT3
from sglang_ascend.quantization.solve import Grid, rtn
from sglang_ascend.quantization.solve.lut import decoded, kmeans
from sglang_ascend.quantization.transforms.rotation import rotation


@pytest.mark.parametrize("size", [1, 7, 64, 88, 96, 240, 576])
def test_a_rotation_is_orthogonal_and_leaves_a_product_as_it_is(size):
    matrix, generator = rotation(size), torch.Generator().manual_seed(size)
    x, w = (torch.randn(5, size, dtype=torch.float64, generator=generator) for _ in range(2))
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert torch.allclose((x @ matrix) @ (w @ matrix).T, x @ w.T, atol=1e-12)
    other = rotation(size, seed=1)  # the control: inputs and weights by different ones
    same = torch.allclose((x @ matrix) @ (w @ other).T, x @ w.T, atol=1e-3)
    assert same == torch.equal(matrix, other)


def test_a_rotation_spreads_one_channel_over_all():
    one = torch.zeros(576, dtype=torch.float64)
    one[100] = 1.0
    assert float((one @ rotation(576)).abs().max()) < 0.15  # 1 / sqrt(64) of what O gives
    assert int((one @ rotation(576)).count_nonzero()) == 576


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
