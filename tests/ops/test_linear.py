"""A linear layer over a prepared weight is x W^T + b, whatever an implementation made of W.

The oracle is the product in float64.
"""

import os
from pathlib import Path

import pytest
import torch
from begun import template
from processors import HASWELL, without

from sglang_ascend.ops import linear
from sglang_ascend.ops.linear import numba, onednn

# Rows of decode, verify, a small batch and prefill; sizes that no vector width divides.
ROWS = pytest.mark.parametrize("rows", [1, 2, 4, 7, 16, 40, 130])
SIZES = pytest.mark.parametrize(
    "sizes", [(1, 1), (7, 5), (50, 96), (576, 1536), (38, 4097)], ids=str
)
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


@IMPLEMENTATIONS
@pytest.mark.parametrize("of_values", DTYPES, ids=str)
def test_a_weight_may_lie_transposed(name, dtype, of_values):
    """Of float32 also one whose values are all bfloat16's."""
    x, weight, _ = draw(3, (40, 64), dtype)
    weight = weight.to(of_values).to(dtype)
    prepared = linear.prepare.implementation(name)(weight.T.contiguous().T)
    assert not differences(linear.linear.implementation(name)(x, prepared), x, weight).any()


def test_rows_of_another_dtype_than_the_weight_are_refused():
    x, weight, _ = draw(4, (7, 5))
    with pytest.raises(RuntimeError, match="dtype"):
        linear.linear(x.bfloat16(), linear.prepare(weight))


@ROWS
def test_bf16_is_multiplied_in_float32_where_the_processor_does_not_multiply_it(monkeypatch, rows):
    x, weight, bias = draw(rows, (33, 4097), torch.bfloat16)
    # Where the processor does not, oneDNN may refuse it.
    for supported in {False, onednn.multiplies_bfloat16()}:
        monkeypatch.setattr(onednn, "multiplies_bfloat16", lambda supported=supported: supported)
        prepared = linear.prepare(weight)
        assert prepared.packed is not None
        assert prepared.packed.dtype == (torch.bfloat16 if supported else torch.float32)
        assert not differences(linear.linear(x, prepared, bias), x, weight, bias).any()


# Pairs of bfloat16 need AVX512-BF16, which not every processor with AVX-512 has; tiles need AMX.
@pytest.mark.parametrize(
    "processor",
    [HASWELL, without("avx512bf16", "amx-bf16")],
    ids=["no AVX-512", "no AVX512-BF16"],
)
def test_bfloat16_is_multiplied_without_products_of_pairs_too(processor, tmp_path):
    program = (
        "import torch\n"
        "from test_linear import differences, draw\n"
        "from sglang_ascend.ops.linear import numba\n"
        "assert not numba.HAS_PAIRS and not numba.HAS_TILES\n"
        "for sizes in (7, 5), (576, 1536), (38, 4097):\n"
        "    for rows in 1, 2:\n"
        "        x, weight, bias = draw(rows, sizes, torch.bfloat16)\n"
        "        prepared = numba.prepare(weight)\n"
        "        result = numba.linear(x, prepared, bias)\n"
        "        assert not differences(result, x, weight, bias).any(), (sizes, rows)\n"
    )
    ops = Path(__file__).parent
    paths = os.pathsep.join(str(folder) for folder in (ops, ops.parent, ops.parents[1]))
    caches = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    done = template().run_text(program, [], {**os.environ, **processor, **caches}, 300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sizes", [(50, 96), (576, 1536)], ids=str)
def test_bfloat16_is_multiplied_without_tiles_too(sizes, monkeypatch):
    monkeypatch.setattr(numba, "HAS_TILES", False)
    x, weight, bias = draw(16, sizes, torch.bfloat16)
    prepared = numba.prepare(weight)
    for rows in range(1, prepared.most_rows + 1):
        result = numba.linear(x[:rows], prepared, bias)
        assert not differences(result, x[:rows], weight, bias).any(), rows


# Of a weight's rows, and of the input.
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_threads", [1, 2])
@SIZES
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(
    sizes, num_threads, dtypes, threads_of
):
    threads_of(num_threads)
    of_rows, of_input = dtypes
    x, weight, bias = (one.to(of_input) for one in draw(64, sizes))
    prepared = numba.prepare(weight.to(of_rows).to(of_input))
    assert prepared.rows is not None and prepared.rows.dtype == of_rows
    x = x[: prepared.most_rows]
    together = numba.linear(x, prepared, bias)
    for rows in (1, 3, 7, 33):
        parts = [numba.linear(part, prepared, bias) for part in x.split(rows)]
        assert torch.equal(torch.cat(parts), together)


def test_a_sum_in_another_order_has_other_bits():
    """The control of the test above."""
    x, weight, _ = draw(4, (7, 512))
    columns = torch.arange(512).flip(0)
    turned = numba.linear(x[:, columns], numba.prepare(weight[:, columns]))
    assert not torch.equal(turned, numba.linear(x, numba.prepare(weight)))


@pytest.fixture
def threads_of():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_a_weight_is_read_as_bfloat16_only_where_that_is_all_that_it_is():
    """One value in thousands is enough."""
    x, weight, _ = draw(4, (33, 576))
    weight = weight.bfloat16().float()
    assert numba.prepare(weight).rows.dtype == torch.bfloat16
    weight[32, 575] += 2**-12
    prepared = numba.prepare(weight)
    assert prepared.rows.dtype == torch.float32
    assert not differences(numba.linear(x, prepared), x, weight).any()


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((9, 24), torch.float32), ((17, 64), torch.bfloat16)], ids=str
)
def test_what_is_not_a_number_is_kept(sizes, dtype):
    x, weight, _ = draw(3, sizes, dtype)
    x[0, 23], x[1, 3], weight[8] = torch.nan, torch.inf, weight[8].abs()
    result = numba.linear(x, numba.prepare(weight))
    assert result[0].isnan().all() and result[1, 8] == torch.inf and result[2].isfinite().all()


@pytest.mark.parametrize("body", ["reference", "numba"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 48, 88), (5, 7, 3), (4, 1, 40)])
def test_each_head_meets_its_own_matrix(body, dtype, rows, width, out):
    generator = torch.Generator().manual_seed(0)
    # As a query's columns without position: a part of those of its head.
    x = torch.randn(rows, 3, width + 5, generator=generator).to(dtype)[..., :width]
    weights = torch.randn(3, width, out, generator=generator).to(dtype)
    assert linear.by_head.body_of(x, weights).name == "numba"
    found = linear.by_head.implementation(body)(x, weights)
    assert found.shape == (rows, 3, out) and found.dtype == dtype
    for head in range(3):
        matrix = weights[head].T
        assert not differences(found[:, head], x[:, head], matrix).any()
        assert differences(found[:, head - 1], x[:, head], matrix).any()


def test_many_heads_products_are_left_to_pytorch():
    x, weights = torch.ones(64, 16, 128), torch.ones(16, 128, 512)
    assert linear.by_head.body_of(x, weights).name == "reference"
    assert linear.by_head.body_of(x[:1], weights[:, :, :64].contiguous()).name == "numba"
    assert linear.by_head.body_of(x[:1, :1], weights[:1].mT).name == "reference"
