"""A prepared product is the arithmetic that the weight's fields spell out, in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_ascend.ops.quantized import probe
from sglang_ascend.quantization.emulated import rounded_inputs
from sglang_ascend.quantization.formats import FP8_E4M3, INT4, INT8
from sglang_ascend.quantization.product import prepare
from sglang_ascend.quantization.solve import Grid, rtn
from sglang_ascend.quantization.weight import PER_TOKEN, WEIGHT_ONLY, InputKind, InputRule

STATIC = InputRule(InputKind.STATIC, INT8, None, 0.031, 9.0)
FP8_TOKEN = InputRule(InputKind.PER_TOKEN, FP8_E4M3)
FP8_GROUPS = InputRule(InputKind.PER_TOKEN, FP8_E4M3, 8)
CASES = {
    "w8a16": (Grid(INT8), WEIGHT_ONLY),
    "w4a16 groups with zeros": (Grid(INT4, (1, 8), symmetric=False), WEIGHT_ONLY),
    "one scale for a tensor": (Grid(INT8, (None, None)), WEIGHT_ONLY),
    "w8a8": (Grid(INT8), PER_TOKEN),
    "w4a8": (Grid(INT4), PER_TOKEN),
    "w4a8 groups": (Grid(INT4, (1, 8)), PER_TOKEN),
    "w8a8 static": (Grid(INT8), STATIC),
    "fp8 blocks": (Grid(FP8_E4M3, (8, 8)), FP8_GROUPS),
    "fp8 per channel": (Grid(FP8_E4M3), FP8_TOKEN),
    "fp8 weight only": (Grid(FP8_E4M3, (8, 8)), WEIGHT_ONLY),
}


def rounded(x: np.ndarray, rule: InputRule) -> np.ndarray:
    """The input after its rule, value by value."""
    if rule.kind == InputKind.NONE:
        return x
    if rule.kind == InputKind.STATIC:
        codes = np.clip(np.round(x / np.float32(rule.scale) + np.float32(rule.offset)), -128, 127)
        return (codes - rule.offset) * rule.scale
    result, group = np.zeros_like(x), rule.group_size or x.shape[1]
    for row in range(len(x)):
        for start in range(0, x.shape[1], group):
            part = x[row, start : start + group]
            scale = np.float32(np.abs(part).max()) / np.float32(rule.number_format.maximum)
            scaled = np.float32(part) / scale
            if rule.number_format is INT8:
                codes = np.clip(np.round(scaled), -127, 127)
            else:
                codes = torch.tensor(scaled).to(torch.float8_e4m3fn).float().numpy()
            result[row, start : start + group] = codes.astype(np.float64) * scale
    return result


@pytest.mark.parametrize("case", CASES)
def test_a_product_is_the_arithmetic_of_its_fields(case):
    grid, rule = CASES[case]
    generator = torch.Generator().manual_seed(0)
    weight = rtn(torch.randn(12, 40, generator=generator), grid, rule)
    x, bias = torch.randn(5, 40, generator=generator), torch.randn(12, generator=generator)
    values = weight.dequantize().double().numpy()
    expected = rounded(x.double().numpy(), rule) @ values.T
    if rule.kind == InputKind.STATIC:
        weight = replace(weight, bias=bias)
        found = prepare(weight)(x)
    else:
        found = prepare(weight)(x, bias)
    error = np.abs(found.numpy() - expected - bias.numpy()).max()
    assert error < (2e-3 if rule.kind == InputKind.STATIC else 1e-4)  # its bias is an integer
    other = replace(weight, scale=weight.scale.roll(1, 0) * 1.1)  # the control: another row's scale
    assert np.abs(prepare(other)(x).numpy() + bias.numpy() - expected - bias.numpy()).max() > 0.01


@pytest.mark.parametrize("case", CASES)
def test_the_rounding_that_smoothing_searches_with_is_the_products(case):
    rule, x = CASES[case][1], torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    found = rounded_inputs(x, rule).double().numpy()
    assert np.abs(found - rounded(x.double().numpy(), rule)).max() < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_servers_prepare_products_while_bfloat16_is_the_default_dtype(case):
    grid, rule = CASES[case]
    weight = rtn(torch.randn(12, 40, generator=torch.Generator().manual_seed(0)), grid, rule)
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    expected, verdicts = prepare(weight)(x), probe.verdicts()
    torch.set_default_dtype(torch.bfloat16)
    probe.verdicts.cache_clear()
    try:
        assert probe.verdicts() == verdicts
        assert "exact" in verdicts.values()
        # Without VNNI some product saturates, and is not chosen.
        if torch.cpu._is_vnni_supported():
            assert set(verdicts.values()) == {"exact"}
        found = prepare(weight)(x)
    finally:
        torch.set_default_dtype(torch.float32)
        probe.verdicts.cache_clear()
    assert torch.equal(found, expected)


def test_a_combination_without_an_operator_is_refused():
    weight = rtn(torch.randn(4, 16), Grid(INT4, (1, 8), symmetric=False), PER_TOKEN)
    with pytest.raises(ValueError, match="no operator multiplies int4 weights"):
        prepare(weight)
    with pytest.raises(ValueError, match="no operator multiplies fp8_e4m3"):
        prepare(rtn(torch.randn(4, 16), Grid(FP8_E4M3, (8, 8)), PER_TOKEN))
