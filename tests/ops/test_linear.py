"""A linear layer over a prepared weight is x W^T + b, whatever an implementation made of W.

The oracle is the product in float64.
"""

import pytest
import torch

from sglang_ascend.ops import linear

# Rows of decode, verify, a small batch and prefill; sizes that no vector width divides.
ROWS = pytest.mark.parametrize("rows", [1, 2, 4, 7, 130])
SIZES = pytest.mark.parametrize("sizes", [(1, 1), (7, 5), (576, 1536), (33, 4097)], ids=str)
IMPLEMENTATIONS = pytest.mark.parametrize("name", list(linear.linear._implementations))


def draw(rows: int, sizes: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, sizes[1]), sizes, (sizes[0],))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, weight, bias


def error_bound(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of a float32 sum of n products in any order: n eps |x| |W|^T, with room for the bias."""
    eps = torch.finfo(torch.float32).eps
    return (x.shape[-1] + 1) * eps * (x.double().abs() @ weight.double().abs().T + 1)


@IMPLEMENTATIONS
@ROWS
@SIZES
@pytest.mark.parametrize("with_bias", [True, False])
def test_it_is_the_product_in_float64(name, rows, sizes, with_bias):
    x, weight, bias = draw(rows, sizes)
    prepared = linear.prepare.implementation(name)(weight)
    result = linear.linear.implementation(name)(x, prepared, bias if with_bias else None)
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    assert result.shape == exact.shape and result.dtype == x.dtype
    assert ((result - exact).abs() <= error_bound(x, weight)).all()


def test_no_rows_give_no_rows():
    x, weight, bias = draw(0, (7, 5))
    assert linear.linear(x, linear.prepare(weight), bias).shape == (0, 7)


def test_a_weight_with_two_rows_exchanged_is_caught():
    x, weight, _ = draw(4, (7, 5))
    exchanged = weight[[1, 0, 2, 3, 4, 5, 6]]
    result = linear.linear(x, linear.prepare(exchanged))
    assert not ((result - x.double() @ weight.double().T).abs() <= error_bound(x, weight)).all()


def test_leading_dimensions_and_strides_are_kept():
    x, weight, bias = draw(12, (7, 5))
    strided = x.repeat(1, 2)[:, ::2].view(3, 4, 5)
    exact = torch.nn.functional.linear(strided.double(), weight.double(), bias.double())
    result = linear.linear(strided, linear.prepare(weight), bias)
    assert result.shape == (3, 4, 7)
    torch.testing.assert_close(result.double(), exact, atol=1e-5, rtol=0)


def test_bf16_stays_with_the_reference():
    x, weight, bias = (tensor.bfloat16() for tensor in draw(4, (7, 5)))
    prepared = linear.prepare(weight)
    assert prepared.packed is None
    expected = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(linear.linear(x, prepared, bias), expected)
