"""Invariant: a quantized weight means (code - zero) * scale, block by block, and slices, refined
blocks and concatenations mean the same numbers bit by bit. The oracle is a loop over elements."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import numpy as np
import pytest
import torch

from sglang_ascend.quantization.formats import (
    FORMATS,
    FP8_E4M3,
    INT2,
    INT4,
    INT8,
    Listed,
    NumberFormat,
)
from sglang_ascend.quantization.weight import (
    PER_TOKEN,
    WEIGHT_ONLY,
    InputKind,
    InputRule,
    QuantizedWeight,
    concatenate,
)

# (out, in, block): per channel, groups with a ragged last one, per tensor, ragged square blocks.
SHAPES = {
    "per channel": (6, 88, (1, 88)),
    "groups": (6, 240, (1, 64)),
    "per tensor": (12, 40, (12, 40)),
    "square": (20, 44, (8, 16)),
}
ZEROS = ("none", "integer", "float")


def make(
    out_features: int,
    in_features: int,
    block: tuple[int, int],
    number_format: NumberFormat = INT8,
    zeros: str = "none",
    shuffled: bool = False,
    seed: int = 0,
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    if number_format.dtype.is_floating_point:
        codes = torch.randn(out_features, in_features, generator=generator).to(number_format.dtype)
    elif isinstance(number_format, Listed):
        finite = [code for code, number in enumerate(number_format.numbers) if isfinite(number)]
        drawn = torch.randint(len(finite), (out_features, in_features), generator=generator)
        codes = torch.tensor(finite, dtype=torch.uint8)[drawn]
    else:
        low, high = int(number_format.minimum), int(number_format.maximum)
        codes = torch.randint(low, high + 1, (out_features, in_features), generator=generator)
        codes = codes.to(torch.int8)
    blocks = (-(-out_features // block[0]), -(-in_features // block[1]))
    zero = {
        "none": None,
        "integer": torch.randint(-9, 9, blocks, generator=generator, dtype=torch.int32),
        "float": torch.randn(blocks, generator=generator),
    }[zeros]
    group_index = None
    if shuffled:
        group_index = torch.arange(in_features) // block[1]
        group_index = group_index[torch.randperm(in_features, generator=generator)]
    return QuantizedWeight(
        codes=codes,
        scale=torch.rand(blocks, generator=generator) + 0.01,
        zero=zero,
        block=block,
        number_format=number_format,
        bias=torch.randn(out_features, generator=generator),
        group_index=group_index,
    )


def by_hand(weight: QuantizedWeight) -> np.ndarray:
    """Element by element, in float32 as the definition says."""
    codes = weight.codes.to(torch.float32).numpy()
    if isinstance(weight.number_format, Listed):
        codes = np.float32(weight.number_format.numbers)[codes.astype(int)]
    scale = weight.scale.numpy()
    values = np.empty_like(codes)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            group = column // weight.block[1]
            if weight.group_index is not None:
                group = int(weight.group_index[column])
            at = row // weight.block[0], group
            zero = np.float32(0) if weight.zero is None else np.float32(weight.zero[at].item())
            values[row, column] = (codes[row, column] - zero) * scale[at]
    return values


def assert_values(weight: QuantizedWeight, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(weight.dequantize().numpy(), expected)


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("number_format", FORMATS.values(), ids=FORMATS)
def test_values_are_the_definition_s(number_format, shape, zeros):
    weight = make(*SHAPES[shape], number_format, zeros)
    assert_values(weight, by_hand(weight))
    other_row = replace(weight, codes=weight.codes.roll(1, 0))
    assert not np.array_equal(other_row.dequantize().numpy(), by_hand(weight))


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("shape", SHAPES)
def test_slices_mean_the_same_numbers_also_inside_a_block(shape, zeros):
    weight = make(*SHAPES[shape], zeros=zeros)
    expected = by_hand(weight)
    out_features, in_features = weight.shape
    for start in range(out_features):
        for stop in range(start + 1, out_features + 1):
            part = weight.rows(start, stop)
            assert_values(part, expected[start:stop])
            assert torch.equal(part.bias, weight.bias[start:stop])
    for start in range(0, in_features, 3):
        for stop in range(start + 1, in_features + 1, 5):
            assert_values(weight.columns(start, stop), expected[:, start:stop])
    inner = weight.rows(3, out_features).columns(7, in_features).rows(1, 3).columns(2, 30)
    assert_values(inner, expected[4:6, 9:37])


def test_slices_of_columns_in_gptq_s_order_keep_their_own_scales():
    weight = make(6, 96, (1, 32), INT4, "integer", shuffled=True)
    expected = by_hand(weight)
    assert_values(weight, expected)
    assert_values(weight.columns(10, 50), expected[:, 10:50])
    assert_values(weight.rows(2, 5), expected[2:5])
    in_plain_order = replace(weight, group_index=None)
    assert not np.array_equal(in_plain_order.dequantize().numpy(), expected)


def test_a_slice_on_block_bounds_copies_no_scale_and_refines_nothing():
    weight = make(16, 256, (8, 128))
    for part in (weight.rows(8, 16), weight.columns(128, 256)):
        assert part.block == weight.block
        assert part.scale.untyped_storage().data_ptr() == weight.scale.untyped_storage().data_ptr()
    per_channel = make(4, 64, (1, 64)).columns(16, 48)
    assert per_channel.scale.shape == (4, 1)


def test_the_products_of_column_slices_sum_to_the_product_with_the_bias_once():
    weight = make(6, 88, (1, 88))
    parts = [weight.columns(0, 40), weight.columns(40, 88)]
    assert torch.equal(parts[0].bias, weight.bias)
    assert parts[1].bias is None


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_concatenation_holds_the_numbers_of_its_parts_in_order(shape, zeros):
    out_features, in_features, block = SHAPES[shape]
    parts = [
        make(out_features, in_features, block, zeros=zeros, seed=1),
        make(5, in_features, block, seed=2),
        make(7, in_features, (1, in_features), zeros="integer", number_format=INT4, seed=3),
    ]
    whole = concatenate(parts)
    assert_values(whole, np.concatenate([by_hand(part) for part in parts]))
    assert torch.equal(whole.bias, torch.cat([part.bias for part in parts]))
    assert whole.number_format is INT8
    exchanged = concatenate([parts[1], parts[0], parts[2]])
    assert not torch.equal(exchanged.dequantize(), whole.dequantize())


def test_codes_of_two_tables_are_not_read_by_one():
    """Both are bytes: HiFloat8 read as NF4 would be numbers, and wrong ones."""
    table, other = make(4, 64, (1, 64), FORMATS["nf4"]), make(4, 64, (1, 64), FORMATS["hif8"])
    assert table.codes.dtype == other.codes.dtype
    with pytest.raises(ValueError, match="differ in inputs, number format"):
        concatenate([table, other])


def test_equal_blocks_stay_in_a_concatenation():
    whole = concatenate([make(256, 256, (128, 128), FP8_E4M3), make(88, 256, (128, 128), FP8_E4M3)])
    assert whole.block == (128, 128)
    assert concatenate([make(4, 88, (1, 88)), make(3, 88, (1, 88))]).scale.shape == (7, 1)


def test_concatenated_columns_in_one_order_keep_it():
    left, right = make(4, 64, (1, 16), INT4, "integer", True), make(3, 64, (1, 16), INT4)
    right = replace(right, group_index=left.group_index)
    expected = np.concatenate([by_hand(left), by_hand(right)])
    assert_values(concatenate([left, right]), expected)


@pytest.mark.parametrize(
    "other",
    [
        make(4, 32, (1, 32)),
        make(4, 64, (1, 64), FP8_E4M3),
        replace(make(4, 64, (1, 64)), input_rule=PER_TOKEN),
        make(4, 64, (1, 64), shuffled=True),
    ],
    ids=["inputs", "number format", "input rule", "group index"],
)
def test_what_no_common_weight_can_hold_is_not_concatenated(other):
    with pytest.raises(ValueError, match="quantize its parts alike"):
        concatenate([make(4, 64, (1, 64)), other])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale", torch.ones(4, 3)),
        ("scale", torch.ones(4, 2, dtype=torch.float64)),
        ("zero", torch.ones(4, 1)),
        ("codes", torch.zeros(4, 64, dtype=torch.int32)),
        ("number_format", FP8_E4M3),
        ("bias", torch.zeros(3)),
        ("group_index", torch.zeros(63, dtype=torch.int64)),
        ("block", (0, 32)),
    ],
)
def test_contradicting_shapes_and_dtypes_are_refused(field, value):
    weight = make(4, 64, (1, 32))
    with pytest.raises(ValueError, match=r"a quantized weight \[4, 64\] cannot have"):
        replace(weight, **{field: value})


def test_bytes_are_those_of_packed_codes():
    assert make(4, 64, (1, 32), INT4).num_bytes == 4 * 64 // 2 + 4 * 2 * 4 + 4 * 4
    assert make(3, 5, (1, 5), INT2, "integer").num_bytes == 4 + 3 * 4 + 3 * 4 + 3 * 4


@pytest.mark.parametrize(("bits", "number_format"), [(2, INT2), (4, INT4), (8, INT8)])
def test_integers_round_half_to_even_and_saturate(bits, number_format):
    half = 1 << (bits - 1)
    values = torch.tensor([-1e9, -half - 1, -1.5, -0.5, 0.5, 0.51, 1.5, half - 1, half, 1e9])
    expected = [-half, -half, max(-2, -half), 0, 0, 1, min(2, half - 1), half - 1, half - 1]
    assert number_format.encode(values).tolist() == [*expected, half - 1]
    every = torch.arange(-half, half, dtype=torch.int8)
    assert torch.equal(number_format.encode(number_format.decode(every)), every)


def test_fp8_holds_the_254_finite_values_of_e4m3_and_rounds_to_the_nearest():
    """Values by the definition of the format: bias 7, three mantissa bits, no infinity."""
    finite = sorted(
        sign * value
        for sign in (-1, 1)
        for value in (
            *(m * 2.0**-9 for m in range(8)),
            *((8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if e < 15 or m < 7),
        )
    )
    table = torch.tensor(finite)
    assert torch.equal(FP8_E4M3.decode(FP8_E4M3.encode(table)), table)
    values = torch.randn(20000, generator=torch.Generator().manual_seed(0)) * 200
    error = (FP8_E4M3.decode(FP8_E4M3.encode(values)) - values).abs()
    nearest = (values[:, None] - table).abs().amin(1)
    assert torch.equal(error, nearest)
    assert FP8_E4M3.decode(FP8_E4M3.encode(torch.tensor([1e9, -1e9]))).tolist() == [448, -448]


def test_only_a_static_input_rule_has_a_scale():
    assert InputRule(InputKind.STATIC, scale=0.5, offset=3.0).number_format is INT8
    assert WEIGHT_ONLY.kind == "none" and PER_TOKEN.kind == "per_token"
    for wrong in ({"kind": InputKind.STATIC}, {"kind": InputKind.PER_TOKEN, "scale": 1.0}):
        with pytest.raises(ValueError, match="static input rule"):
            InputRule(**wrong)
