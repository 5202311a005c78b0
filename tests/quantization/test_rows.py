"""Rows of bytes are the weight: joined, cut and sent on, they read back to the same values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from sglang_ascend.quantization.formats import FP8_E4M3, INT4, INT8, NumberFormat
from sglang_ascend.quantization.rows import from_rows, to_rows
from sglang_ascend.quantization.weight import (
    PER_TOKEN,
    WEIGHT_ONLY,
    InputKind,
    InputRule,
    QuantizedWeight,
    concatenate,
)

STATIC = InputRule(InputKind.STATIC, scale=0.125, offset=-3.0)
BLOCKS_OF_INPUT = InputRule(InputKind.PER_TOKEN, FP8_E4M3, group_size=16)


def weight_of(
    form: NumberFormat,
    rule: InputRule,
    block: tuple[int, int],
    *,
    shape: tuple[int, int] = (6, 40),
    zero: torch.dtype | None = None,
    bias: bool = False,
    index: bool = False,
    seed: int = 0,
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(shape, generator=generator) * (form.maximum - form.minimum) + form.minimum
    blocks = tuple(-(-size // width) for size, width in zip(shape, block, strict=True))
    scale = torch.rand(blocks, generator=generator) + 0.5
    return QuantizedWeight(
        form.encode(values),
        scale,
        None if zero is None else (8 * scale).to(zero),
        block,
        form,
        rule,
        bias=torch.randn(shape[0], generator=generator) if bias else None,
        group_index=torch.arange(shape[1]).flip(0) % blocks[1] if index else None,
    )


WEIGHTS = {
    "int8 per token": lambda seed: weight_of(INT8, PER_TOKEN, (1, 40), seed=seed),
    "int8 static, bias": lambda seed: weight_of(INT8, STATIC, (1, 40), bias=True, seed=seed),
    "int4 groups, zeros": lambda seed: weight_of(
        INT4, WEIGHT_ONLY, (1, 16), zero=torch.int32, seed=seed
    ),
    "int4 float zeros, act-order": lambda seed: weight_of(
        INT4, WEIGHT_ONLY, (1, 16), zero=torch.float32, index=True, seed=seed
    ),
    "fp8 blocks": lambda seed: weight_of(FP8_E4M3, BLOCKS_OF_INPUT, (4, 16), seed=seed),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_was_written_is_read(name):
    weight = WEIGHTS[name](0)
    found = from_rows(to_rows(weight))
    assert_close(found.dequantize(), weight.dequantize(), rtol=0, atol=0)
    assert (found.number_format, found.input_rule) == (weight.number_format, weight.input_rule)
    assert (found.bias is None) == (weight.bias is None)
    if weight.bias is not None:
        assert_close(found.bias, weight.bias, rtol=0, atol=0)


@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_may_be_joined_and_cut(name):
    first, second = WEIGHTS[name](1), WEIGHTS[name](2)
    rows = torch.cat([to_rows(first), to_rows(second)])
    expected = torch.cat([first.dequantize(), second.dequantize()])
    assert_close(from_rows(rows).dequantize(), expected, rtol=0, atol=0)
    assert_close(from_rows(rows[5:9]).dequantize(), expected[5:9], rtol=0, atol=0)
    # The control: rows in another order are another weight.
    assert not torch.equal(from_rows(rows.flip(0)).dequantize(), expected)


def test_parts_of_several_widths_are_one_weight():
    wide = weight_of(INT8, PER_TOKEN, (1, 40))
    narrow = weight_of(INT4, PER_TOKEN, (1, 40), seed=1)
    joined = from_rows(torch.cat([to_rows(wide), to_rows(narrow)]))
    assert joined.number_format is INT8
    expected = concatenate([wide, narrow]).dequantize()
    assert_close(joined.dequantize(), expected, rtol=0, atol=0)


def test_parts_of_other_orders_of_columns_are_refused():
    first = WEIGHTS["int4 float zeros, act-order"](1)
    second = replace(first, group_index=first.group_index.roll(1))
    with pytest.raises(ValueError, match="group index"):
        from_rows(torch.cat([to_rows(first), to_rows(second)]))


def test_parts_with_other_inputs_are_refused():
    dynamic, static = (weight_of(INT8, rule, (1, 40)) for rule in (PER_TOKEN, STATIC))
    with pytest.raises(ValueError, match="input rule"):
        from_rows(torch.cat([to_rows(dynamic), to_rows(static)]))
