"""A linear layer over a prepared weight is x W^T + b, whatever an implementation made of W.

The oracle is the product in float64.
"""

import pytest
import torch

from sglang_ascend.ops import linear
from sglang_ascend.ops.linear import onednn

# Rows of decode, verify, a small batch and prefill; sizes that no vector width divides.
ROWS = pytest.mark.parametrize("rows", [1, 2, 4, 7, 130])
SIZES = pytest.mark.parametrize("sizes", [(1, 1), (7, 5), (576, 1536), (33, 4097)], ids=str)
DTYPES = (torch.float32, torch.bfloat16)
# Each implementation in every dtype that it accepts.
IMPLEMENTATIONS = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name, prepare in linear.prepare._implementations.items()
        for dtype in DTYPES
        if prepare.accepts(torch.ones(1, 1, dtype=dtype))
    ],
    ids=str,
)


def draw(
    rows: int, sizes: tuple[int, int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, sizes[1]), sizes, (sizes[0],))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


def differences(
    result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Where the result is further from the product in float64 than rounding explains.

    A float32 sum of n products in any order errs by n eps |x| |W|^T at most; then the product and
    the sum with the bias are each rounded to the dtype of the result.
    """
    product = x.double() @ weight.double().T
    exact = product if bias is None else product + bias.double()
    of_sums = (x.shape[-1] + 1) * torch.finfo(torch.float32).eps
    bound = of_sums * (x.double().abs() @ weight.double().abs().T + 1)
    bound += torch.finfo(result.dtype).eps / 2 * (product.abs() + exact.abs())
    return (result - exact).abs() > bound


@IMPLEMENTATIONS
@ROWS
@SIZES
@pytest.mark.parametrize("with_bias", [True, False])
def test_it_is_the_product_in_float64(name, dtype, rows, sizes, with_bias):
    x, weight, bias = draw(rows, sizes, dtype)
    prepared = linear.prepare.implementation(name)(weight)
    given = (bias,) if with_bias else ()
    result = linear.linear.implementation(name)(x, prepared, *given)
    assert result.shape == (rows, sizes[0]) and result.dtype == dtype
    assert not differences(result, x, weight, *given).any()


def test_no_rows_give_no_rows():
    x, weight, bias = draw(0, (7, 5))
    assert linear.linear(x, linear.prepare(weight), bias).shape == (0, 7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_with_two_rows_exchanged_is_caught(dtype):
    x, weight, _ = draw(4, (7, 5), dtype)
    exchanged = weight[[1, 0, 2, 3, 4, 5, 6]]
    result = linear.linear(x, linear.prepare(exchanged))
    assert differences(result, x, weight).any(0).tolist() == [True, True] + [False] * 5


def test_a_sum_kept_in_bfloat16_is_caught():
    x, weight, _ = draw(4, (7, 512), torch.bfloat16)
    total = torch.zeros(4, 7, dtype=torch.bfloat16)
    for i in range(512):
        total += x[:, i, None] * weight[:, i]
    assert differences(total, x, weight).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_left_out_is_caught(dtype):
    x, weight, bias = draw(4, (7, 5), dtype)
    assert differences(linear.linear(x, linear.prepare(weight)), x, weight, bias).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_leading_dimensions_and_strides_are_kept(dtype):
    x, weight, bias = draw(12, (7, 5), dtype)
    strided = x.repeat(1, 2)[:, ::2].view(3, 4, 5)
    result = linear.linear(strided, linear.prepare(weight), bias)
    assert result.shape == (3, 4, 7)
    assert not differences(result, strided, weight, bias).any()


def test_rows_of_another_dtype_than_the_weight_are_refused():
    x, weight, _ = draw(4, (7, 5))
    with pytest.raises(RuntimeError, match="dtype"):
        linear.linear(x.bfloat16(), linear.prepare(weight))


@ROWS
def test_bf16_is_multiplied_in_float32_where_onednn_does_not_multiply_it(monkeypatch, rows):
    x, weight, bias = draw(rows, (33, 4097), torch.bfloat16)
    # Where oneDNN does not, it cannot be made to.
    for supported in {False, onednn.multiplies_bfloat16()}:
        monkeypatch.setattr(onednn, "multiplies_bfloat16", lambda supported=supported: supported)
        prepared = linear.prepare(weight)
        assert prepared.packed is not None
        assert prepared.packed.dtype == (torch.bfloat16 if supported else torch.float32)
        assert not differences(linear.linear(x, prepared, bias), x, weight, bias).any()
