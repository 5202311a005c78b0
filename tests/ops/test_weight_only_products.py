"""A product with decoded weights, integers or E4M3, is the float64 product of what they decode to.

Every body that serves a CPU is held to what rounding explains; a zero point left out, another
group's scale or a column out of its place is not explained.
"""

from __future__ import annotations

import pytest
import torch

from sglang_ascend.ops import quantized
from sglang_ascend.ops.dispatch import Op

ROWS = pytest.mark.parametrize("rows", [1, 4, 7, 66])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# (out, in, columns of a scale).
SIZES = [(1, 1, 1), (7, 5, 5), (64, 256, 32), (33, 1536, 64), (9, 240, 32), (12, 88, 88)]


def bodies(op: Op) -> list[str]:
    return [name for name, body in op._implementations.items() if body.serves("cpu")]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn(*shape: int, bits: int = 8, seed: int = 1) -> torch.Tensor:
    least = -(2 ** (bits - 1))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(least, -least, shape, generator=generator).to(torch.int8)


def scales(*shape: int, seed: int = 2) -> torch.Tensor:
    return 0.001 + torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def agrees(found: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> bool:
    """A float32 sum of n products errs by n eps |x| |W|^T at most, then is rounded once."""
    exact = x.double() @ values.T
    of_sums = (x.shape[-1] + 4) * torch.finfo(torch.float32).eps
    bound = of_sums * (x.double().abs() @ values.abs().T)
    bound += torch.finfo(found.dtype).eps / 2 * exact.abs()
    return bool(((found.double() - exact).abs() <= bound).all())


def decoded(codes, scale, zero, index) -> torch.Tensor:
    """float64, column by column."""
    values = torch.empty(codes.shape, dtype=torch.float64)
    for column, group in enumerate(index.tolist()):
        offset = 0.0 if zero is None else zero[..., group].double()
        values[..., column] = (codes[..., column].double() - offset) * scale[..., group].double()
    return values


ZEROS = {
    "symmetric": lambda shape, bits: None,
    "integer": lambda shape, bits: drawn(*shape, bits=bits, seed=3),
    "float": lambda shape, bits: 3 * noise(*shape, seed=3),
}


@pytest.mark.parametrize("body", bodies(quantized.weight_only_linear))
@ROWS
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ZEROS)
@DTYPES
def test_it_is_the_product_with_the_decoded_weight(body, rows, sizes, bits, kind, dtype):
    out, width, group_size = sizes
    groups = -(-width // group_size)
    x, codes, scale = (
        noise(rows, width).to(dtype),
        drawn(out, width, bits=bits),
        scales(out, groups),
    )
    zero = ZEROS[kind]((out, groups), bits)
    options = {"bits": bits, "group_size": group_size}
    weight = prepared(body, codes, scale, zero, **options)
    if weight is None:
        return
    found = quantized.weight_only_linear.implementation(body)(x, weight)
    index = torch.arange(width) // group_size
    assert found.dtype == dtype
    assert agrees(found, x, decoded(codes, scale, zero, index))
    if out > 1:
        assert not agrees(found, x, decoded(codes, scale.roll(1, 0), zero, index))
    if kind != "symmetric":
        assert not agrees(found, x, decoded(codes, scale, None, index))
        assert not agrees(found, x, decoded(codes, scale, -zero, index))


def prepared(body: str, codes, scale, zero=None, **options):
    """By the body's own preparation, if it has one; None if that does not take them."""
    own = quantized.prepare_weight_only._implementations
    chosen = own[body if body in own else "reference"]
    if not chosen.accepts(codes, scale, zero, **options):
        return None
    return chosen.function(codes, scale, zero, **options)


@pytest.mark.parametrize("bits", [8, 4])
def test_columns_may_name_their_scale_out_of_order(bits):
    """GPTQ's act-order; a slice of it (tensor parallel) has groups of unlike sizes, or none."""
    x, codes, scale = noise(4, 96), drawn(6, 96, bits=bits), scales(6, 5)
    zero = drawn(6, 5, bits=bits, seed=3)
    index = torch.randint(5, (96,), generator=torch.Generator().manual_seed(4))
    index[index == 3] = 0
    weight = quantized.prepare_weight_only(codes, scale, zero, bits=bits, group_index=index)
    found = quantized.weight_only_linear(x, weight)
    assert agrees(found, x, decoded(codes, scale, zero, index))
    assert not agrees(found, x, decoded(codes, scale, zero, index.sort().values))


@pytest.mark.parametrize("body", bodies(quantized.weight_only_linear))
@DTYPES
def test_the_bias_is_added_before_the_one_rounding(body, dtype):
    x, codes, scale, bias = noise(4, 64).to(dtype), drawn(32, 64), scales(32, 1), noise(32, seed=5)
    weight = prepared(body, codes, scale)
    if weight is None:
        return
    found = quantized.weight_only_linear.implementation(body)(x, weight, bias)
    with_one = torch.cat([x, torch.ones(4, 1, dtype=dtype)], dim=1)
    values = decoded(codes, scale, None, torch.zeros(64, dtype=torch.int64))
    assert agrees(found, with_one, torch.cat([values, bias.double()[:, None]], dim=1))
    assert not agrees(found, x, values)


@pytest.mark.parametrize("body", bodies(quantized.grouped_weight_only_linear))
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ZEROS)
@DTYPES
def test_the_rows_of_each_expert_meet_its_own_matrix(body, bits, kind, dtype):
    x, codes, scale = noise(13, 48).to(dtype), drawn(4, 6, 48, bits=bits), scales(4, 6, 2)
    zero, counts = ZEROS[kind]((4, 6, 2), bits), torch.tensor([5, 0, 7, 1])
    weight = prepared(body, codes, scale, zero, bits=bits, group_size=32)
    if weight is None:
        return
    found = quantized.grouped_weight_only_linear.implementation(body)(x, weight, counts)
    values = decoded(codes, scale, zero, torch.arange(48) // 32)
    parts = zip(found.split(counts.tolist()), x.split(counts.tolist()), values, strict=True)
    assert all(agrees(*part) for part in parts)
    astray = zip(found.split([5, 1, 6, 1]), x.split([5, 1, 6, 1]), values, strict=True)
    assert not all(agrees(*part) for part in astray)


def test_groups_of_unlike_sizes_are_not_an_npus():
    """A rank's columns of a weight whose groups are out of order: its operator knows one size."""
    from sglang_ascend.ops.quantized import npu

    codes, scale, x = drawn(8, 64), scales(8, 2), torch.ones(1, 64, dtype=torch.bfloat16)
    for sizes, is_taken in ((32, 32), True), ((24, 40), False):
        index = torch.repeat_interleave(torch.arange(2), torch.tensor(sizes))
        weight = npu.prepare_weight_only(codes, scale, group_size=32, group_index=index)
        assert npu.accepts_weight_only(x, weight) == is_taken


def test_leading_dimensions_are_kept_and_no_rows_give_none():
    x, codes, scale = noise(3, 4, 80)[..., ::2], drawn(6, 40), scales(6, 1)
    weight = quantized.prepare_weight_only(codes, scale)
    found = quantized.weight_only_linear(x, weight)
    values = decoded(codes, scale, None, torch.zeros(40, dtype=torch.int64))
    assert found.shape == (3, 4, 6) and agrees(found.view(12, 6), x.reshape(12, 40), values)
    assert quantized.weight_only_linear(x[:0], weight).shape == (0, 4, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero": scales(2, 2)}, "scales are float32"),
        ({"group_size": 2}, "scales are float32"),
        ({"group_index": torch.zeros(3).long()}, "group_index is"),
        ({"group_index": torch.full((4,), 1)}, "group_index names"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        quantized.prepare_weight_only(drawn(2, 4), scales(2, 1), **changes)
