"""The experts' products are those of the decoded weights, group by group."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from sglang_ascend.quantization.formats import FP8_E4M3, INT4, INT8
from sglang_ascend.quantization.product import prepare_grouped
from sglang_ascend.quantization.weight import (
    PER_TOKEN,
    WEIGHT_ONLY,
    InputKind,
    InputRule,
    QuantizedWeight,
)

COUNTS = torch.tensor([3, 0, 4])
ROWS, WIDTH, OUT = 7, 40, 6
FORMS = {
    "int8": (INT8, WEIGHT_ONLY, (1, WIDTH), None),
    "int4 groups and zeros": (INT4, WEIGHT_ONLY, (1, 16), torch.int32),
    "int8 per token": (INT8, PER_TOKEN, (1, WIDTH), None),
    "int4 groups per token": (INT4, PER_TOKEN, (1, 16), None),
    "fp8 blocks, float input": (FP8_E4M3, WEIGHT_ONLY, (4, 16), None),
}


def weights_of(form, rule, block, zero) -> list[QuantizedWeight]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in COUNTS:
        values = torch.rand(OUT, WIDTH, generator=generator) - 0.5
        codes = form.encode(values * 2 * min(form.maximum, 127))
        scale = torch.rand(-(-OUT // block[0]), -(-WIDTH // block[1]), generator=generator) + 0.5
        zeros = None if zero is None else (3 * scale).to(zero)
        found.append(QuantizedWeight(codes, scale, zeros, block, form, rule))
    return found


def exact(rows: torch.Tensor, weights: list[QuantizedWeight], per_token: bool) -> torch.Tensor:
    """float64, with the rows rounded to int8 where the rule says so."""
    rows = rows.double()
    if per_token:
        scale = rows.abs().amax(1, keepdim=True) / 127
        rows = (rows / scale).round() * scale
    groups = zip(rows.split(COUNTS.tolist()), weights, strict=True)
    return torch.cat([part @ weight.dequantize().double().T for part, weight in groups])


@pytest.mark.parametrize("name", FORMS)
def test_each_group_is_multiplied_with_its_own_weight(name):
    weights = weights_of(*FORMS[name])
    # Eighths of small integers: no sum of a product is rounded, no row lies between two codes.
    rows = torch.randint(-127, 128, (ROWS, WIDTH), generator=torch.Generator().manual_seed(1))
    rows[:, 0] = 127
    rows = rows / 8
    found = prepare_grouped(weights, torch.float32)(rows, COUNTS)
    per_token = FORMS[name][1].kind == InputKind.PER_TOKEN
    expected = exact(rows, weights, per_token)
    assert_close(found.double(), expected, rtol=1e-5, atol=1e-4 * float(expected.abs().max()))
    exchanged = exact(rows, weights[::-1], per_token)
    assert not torch.allclose(found.double(), exchanged, rtol=1e-2, atol=1e-2)


def test_float_experts_beside_quantized_ones_are_multiplied_as_floats():
    first, second, third = weights_of(*FORMS["int8"])
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    found = prepare_grouped([first, second.dequantize(), third], torch.float32)(rows, COUNTS)
    expected = exact(rows, [first, second, third], per_token=False)
    assert_close(found.double(), expected, rtol=1e-5, atol=1e-4 * float(expected.abs().max()))


def test_experts_that_are_quantized_in_two_ways_are_refused():
    mixed = [*weights_of(*FORMS["int8"])[:2], weights_of(*FORMS["int8 per token"])[2]]
    with pytest.raises(ValueError, match="several ways"):
        prepare_grouped(mixed, torch.float32)


def test_a_product_that_no_operator_has_names_the_way_out():
    rule = InputRule(InputKind.STATIC, scale=0.5, offset=0.0)
    with pytest.raises(ValueError, match="convert the checkpoint to float32"):
        prepare_grouped(weights_of(INT8, rule, (1, WIDTH), None), torch.float32)
    by_whole_rows = InputRule(InputKind.PER_TOKEN, FP8_E4M3)
    with pytest.raises(ValueError, match="no operator multiplies fp8_e4m3"):
        prepare_grouped(weights_of(FP8_E4M3, by_whole_rows, (4, 16), None), torch.float32)
