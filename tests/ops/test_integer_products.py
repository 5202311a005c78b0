"""A product of quantized weights is int64 arithmetic, bit for bit, in every body that serves a CPU.

The oracle sums in NumPy's int64 and rounds where the definition says; what could make the same
numbers by luck (another scale's row, swapped nibbles, a saturated sum) does not pass.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_ascend.ops import quantized
from sglang_ascend.ops.dispatch import REFERENCE, Op
from sglang_ascend.ops.quantized import integer, probe

# Rows of decode, verify, a small batch and prefill; sizes that no vector width divides.
ROWS = pytest.mark.parametrize("rows", [1, 4, 7, 66])
# (out, in, columns of a scale): per channel, in groups, and the last of them narrower.
SIZES = pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (7, 5, 5), (33, 1536, 1536), (9, 240, 32), (12, 88, 32)], ids=str
)
BITS = pytest.mark.parametrize("bits", [8, 4])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def bodies(op: Op) -> list[str]:
    """The reference, and what is exact here, be it chosen or not."""
    verdicts = probe.verdicts()
    exact = (REFERENCE, *(name for name, verdict in verdicts.items() if verdict == "exact"))
    return [name for name in op._implementations if name in exact]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn(*shape: int, bits: int = 8, seed: int = 1) -> torch.Tensor:
    least = -(2 ** (bits - 1))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(least, -least, shape, generator=generator).to(torch.int8)


def scales(*shape: int, seed: int = 2) -> torch.Tensor:
    return 0.001 + torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def quantized_rows(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of float rows, element by element as the definition has it."""
    wide = x.float().numpy()
    scale = np.abs(wide).max(axis=-1) / np.float32(127)
    divisor = np.where(scale == 0, np.float32(1), scale)[..., None]
    return np.clip(np.rint(wide / divisor), -127, 127).astype(np.int64), scale


def exact_product(
    codes: np.ndarray, weight: torch.Tensor, scale: torch.Tensor, group_size: int
) -> np.ndarray:
    """The scaled sum of the groups' int64 products, each step rounded to float32."""
    matrix, of_groups = weight.numpy().astype(np.int64), scale.numpy()
    total = np.zeros((len(codes), len(matrix)), np.float32)
    for group, start in enumerate(range(0, matrix.shape[1], group_size)):
        columns = slice(start, start + group_size)
        product = codes[:, columns] @ matrix[:, columns].T
        total = total + product.astype(np.float32) * of_groups[:, group]
    return total


def expected(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, group_size: int
) -> torch.Tensor:
    codes, row_scale = quantized_rows(x)
    total = exact_product(codes, weight, scale, group_size) * row_scale[:, None]
    return torch.from_numpy(total).to(x.dtype)


def times_identity(body: str, x: torch.Tensor, **static: torch.Tensor) -> torch.Tensor:
    """The codes of ``x``, times the scales of its rows if their scale is not static."""
    identity = torch.eye(x.shape[-1]).to(torch.int8)
    weight = prepared(body, identity, torch.ones(len(identity), 1), **static)
    return quantized.integer_linear.implementation(body)(x, weight)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 3, 1536)], ids=str)
def test_a_row_is_divided_by_its_largest_and_rounded_to_even(dtype, shape):
    x = noise(*shape).to(dtype)
    x.view(-1, shape[-1])[-1] = 0
    codes, scale = integer.quantize_per_token(x)
    wanted, of_rows = quantized_rows(x)
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert np.array_equal(codes.numpy(), wanted)
    assert np.array_equal(scale.numpy(), of_rows)
    assert scale.flatten()[-1] == 0 and not codes.view(-1, shape[-1])[-1].any()
    products = torch.from_numpy(wanted.astype(np.float32) * of_rows[..., None]).to(dtype)
    for body in bodies(quantized.integer_linear):
        assert torch.equal(times_identity(body, x), products), body
        assert not torch.equal(times_identity(body, -x - 1), products), body


@pytest.mark.parametrize("body", bodies(quantized.integer_linear))
def test_ties_go_to_the_even_code(body):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]])
    assert times_identity(body, x).tolist() == [[127, 0, 2, 2, 0, -2, -126]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_gives_a_row_that_is_not(value):
    x = noise(3, 40)
    x[1, 17] = value
    for name in bodies(quantized.integer_linear):
        weight = prepared(name, drawn(5, 40), scales(5, 1))
        found = quantized.integer_linear.implementation(name)(x, weight)
        assert found.isfinite().all(dim=1).tolist() == [True, False, True], name


@pytest.mark.parametrize("body", bodies(quantized.integer_linear))
@DTYPES
def test_a_static_scale_and_offset_saturate(body, dtype):
    x = (20 * noise(4, 33)).to(dtype)
    x[0, :4] = torch.tensor([1e4, -1e4, 0.15, 0.25], dtype=dtype)
    static = {"input_scale": torch.tensor([0.1]), "input_offset": torch.tensor([-3.0])}
    if not takes(body, drawn(33, 33), scales(33, 1), **static):
        return
    codes = times_identity(body, x, **static)
    wanted = np.rint(x.float().numpy() / np.float32(0.1) + np.float32(-3))
    assert np.array_equal(codes.float().numpy(), np.clip(wanted, -128, 127))
    assert codes[0, :2].tolist() == [127, -128]


def prepared(body: str, codes: torch.Tensor, scale: torch.Tensor, **options):
    """By the body's own preparation, if it has one."""
    own = quantized.prepare_integer._implementations
    return own[body if body in own else "reference"].function(codes, scale, **options)


def takes(body: str, codes: torch.Tensor, scale: torch.Tensor, **options) -> bool:
    own = quantized.prepare_integer._implementations
    return body not in own or own[body].accepts(codes, scale, **options)


@pytest.mark.parametrize("body", bodies(quantized.integer_linear))
@ROWS
@SIZES
@BITS
@DTYPES
def test_it_is_int64_arithmetic(body, rows, sizes, bits, dtype):
    out, width, group_size = sizes
    x, codes = noise(rows, width).to(dtype), drawn(out, width, bits=bits)
    scale, options = scales(out, -(-width // group_size)), {"bits": bits, "group_size": group_size}
    if not takes(body, codes, scale, **options):
        return
    weight = prepared(body, codes, scale, **options)
    found = quantized.integer_linear.implementation(body)(x, weight)
    assert torch.equal(found, expected(x, codes, scale, group_size))
    if out > 1:
        assert not torch.equal(found, expected(x, codes, scale.roll(1, 0), group_size))
    if bits == 4 and width > 1:
        swapped = torch.cat([codes[:, width // 2 :], codes[:, : width // 2]], dim=1)
        assert not torch.equal(found, expected(x, swapped, scale, group_size))


@pytest.mark.parametrize("body", bodies(quantized.integer_linear))
@pytest.mark.parametrize("sign", [1, -1])
@ROWS
def test_the_largest_codes_do_not_saturate(body, sign, rows):
    x = torch.full((rows, 4096), 3.0)
    codes = torch.full((5, 4096), sign * 127, dtype=torch.int8)
    weight = prepared(body, codes, torch.ones(5, 1))
    found = quantized.integer_linear.implementation(body)(x, weight)
    row_scale = np.float32(3) / np.float32(127)
    assert (found == float(np.float32(sign * 127 * 127 * 4096) * row_scale)).all()


@pytest.mark.parametrize("body", bodies(quantized.integer_linear))
@DTYPES
def test_the_bias_joins_before_the_one_rounding(body, dtype):
    x, codes, scale, bias = noise(3, 40).to(dtype), drawn(6, 40), scales(6, 1), noise(6, seed=5)
    found = quantized.integer_linear.implementation(body)(x, prepared(body, codes, scale), bias)
    exact = expected(x.float(), codes, scale, 40) + bias
    assert torch.equal(found, exact.to(dtype))
    assert not torch.equal(found, expected(x, codes, scale, 40))


@pytest.mark.parametrize("body", bodies(quantized.integer_linear))
@ROWS
@DTYPES
def test_the_static_form_is_modelslim_s(body, rows, dtype):
    """y = (q W^T + quant_bias) * deq_scale."""
    x, codes, deq_scale = noise(rows, 40).to(dtype), drawn(6, 40), scales(6, 1)
    quant_bias = torch.arange(-3, 3, dtype=torch.int32) * 1000
    step, offset = torch.tensor([0.02]), torch.tensor([5.0])
    static = {"input_scale": step, "input_offset": offset, "quant_bias": quant_bias}
    if not takes(body, codes, deq_scale, **static):
        return
    weight = prepared(body, codes, deq_scale, **static)
    found = quantized.integer_linear.implementation(body)(x, weight)
    q = np.rint(x.float().numpy() / np.float32(0.02) + np.float32(5)).clip(-128, 127)
    total = q.astype(np.int64) @ codes.numpy().astype(np.int64).T + quant_bias.numpy()
    exact = torch.from_numpy(total.astype(np.float32)) * deq_scale[:, 0]
    assert torch.equal(found, exact.to(dtype))
    without = torch.from_numpy((total - quant_bias.numpy()).astype(np.float32)) * deq_scale[:, 0]
    assert not torch.equal(found, without.to(dtype))


@pytest.mark.parametrize("body", bodies(quantized.integer_linear))
def test_leading_dimensions_and_strides_are_kept_and_no_rows_give_none(body):
    x, codes, scale = noise(3, 4, 80)[..., ::2], drawn(6, 40), scales(6, 1)
    weight = prepared(body, codes, scale)
    found = quantized.integer_linear.implementation(body)(x, weight)
    assert torch.equal(found.view(12, 6), expected(x.reshape(12, 40), codes, scale, 40))
    empty = quantized.integer_linear.implementation(body)(x[:0], weight)
    assert empty.shape == (0, 4, 6)


@pytest.mark.parametrize("body", bodies(quantized.grouped_integer_linear))
@BITS
@pytest.mark.parametrize("group_size", [48, 32])
@DTYPES
def test_the_rows_of_each_expert_meet_its_own_matrix(body, bits, group_size, dtype):
    x, codes = noise(13, 48).to(dtype), drawn(4, 6, 48, bits=bits)
    scale, counts = scales(4, 6, -(-48 // group_size)), torch.tensor([5, 0, 7, 1])
    weight = prepared(body, codes, scale, bits=bits, group_size=group_size)
    found = quantized.grouped_integer_linear.implementation(body)(x, weight, counts)
    groups = zip(x.split(counts.tolist()), codes, scale, strict=True)
    exact = [expected(rows, *matrix, group_size) for rows, *matrix in groups]
    assert torch.equal(found, torch.cat(exact))
    astray = quantized.grouped_integer_linear.implementation(body)(x, weight, counts.flip(0))
    assert not torch.equal(astray, torch.cat(exact))
    none = torch.zeros_like(counts)
    assert quantized.grouped_integer_linear.implementation(body)(x[:0], weight, none).shape == (
        0,
        6,
    )


def test_weights_are_resident_once():
    """Of a linear of smollm2, bf16 being 100 %: W8A8 at most 52, W4A8 at most 32."""
    out, width = 960, 576
    in_bf16 = 2 * out * width
    int8 = quantized.prepare_integer(drawn(out, width), scales(out, 1))
    assert int8.num_bytes <= 0.52 * in_bf16
    for group_size in (width, 32):
        scale = scales(out, width // group_size)
        options = {"bits": 4, "group_size": group_size}
        int4 = quantized.prepare_integer(drawn(out, width, bits=4), scale, **options)
        assert int4.num_bytes <= 0.32 * in_bf16


@pytest.mark.parametrize(
    ("codes", "scale", "options", "message"),
    [
        (torch.zeros(2, 3), scales(2, 1), {}, "codes are int8"),
        (drawn(2, 3), scales(2), {}, "scales are float32"),
        (drawn(2, 3), scales(3, 1), {}, "scales are float32"),
        (drawn(2, 3), scales(2, 1).double(), {}, "scales are float32"),
        (drawn(2, 3), scales(2, 1), {"group_size": 2}, "scales are float32"),
        (torch.full((2, 3), 8, dtype=torch.int8), scales(2, 1), {"bits": 4}, "outside of 4 bits"),
        (drawn(2, 3), scales(2, 1), {"input_offset": torch.ones(1)}, "static input_scale"),
        (drawn(1, 2, 3), scales(1, 2, 1), {"input_scale": torch.ones(1)}, "one matrix"),
        (drawn(1, 140_000), scales(1, 1), {}, "int32 sum"),
    ],
)
def test_what_does_not_fit_is_refused(codes, scale, options, message):
    with pytest.raises(ValueError, match=message):
        quantized.prepare_integer(codes, scale, **options)


@pytest.fixture
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 5], indirect=True)
def test_threads_share_the_rows_of_weights_and_miss_none(threads):
    sizes = 3001, 160
    x, codes, scale = noise(6, 160), drawn(*sizes), scales(3001, 1)
    wanted = expected(x, codes, scale, 160)
    for body in bodies(quantized.integer_linear):
        weight = prepared(body, codes, scale)
        for _ in range(20):
            found = quantized.integer_linear.implementation(body)(x, weight)
            assert torch.equal(found, wanted), body
