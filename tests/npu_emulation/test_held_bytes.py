"""What a product holds on an NPU is known without one, of a weight on the meta device.

Compared with the storages that a product which was prepared on the emulated NPU keeps alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from types import FunctionType
from typing import Any

import pytest
import torch

from sglang_ascend.quantization.formats import (
    FP8_E4M3,
    HIF4,
    HIF8,
    INT2,
    INT4,
    INT8,
    MXFP4,
    MXFP8,
    NF4,
    NumberFormat,
)
from sglang_ascend.quantization.product import held, held_grouped, prepare, prepare_grouped
from sglang_ascend.quantization.solve import Grid, hqq, rtn
from sglang_ascend.quantization.weight import (
    PER_TOKEN,
    WEIGHT_ONLY,
    InputKind,
    InputRule,
    QuantizedWeight,
)

OUT, WIDTH, EXPERTS = 96, 192, 3
META, NPU = torch.device("meta"), torch.device("npu")
STATIC = InputRule(InputKind.STATIC, INT8, None, 0.03125, 7.0)
ROTATED = replace(PER_TOKEN, rotated=True)
INT4_INPUTS = replace(PER_TOKEN, number_format=INT4)
FLOATS, CODES = True, False


def rounded(form: NumberFormat, rule: InputRule, columns: int | None = None, **options: Any):
    rows = options.pop("rows", OUT)
    block = (options.pop("block_rows", 1), columns)
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    return rtn(values, Grid(form, block, **options), rule)


def per_token(form: NumberFormat, group_size: int | None = None) -> InputRule:
    return InputRule(InputKind.PER_TOKEN, form, group_size)


def with_order(weight: QuantizedWeight) -> QuantizedWeight:
    index = torch.arange(WIDTH) % weight.scale.shape[1]
    return replace(weight, group_index=index)


# By name a weight, and whether it is held as floats there.
LINEARS = {
    "w8a8": (rounded(INT8, PER_TOKEN), CODES),
    "w8a8 rotated": (rounded(INT8, ROTATED), CODES),
    "w8a8 static": (rounded(INT8, STATIC), CODES),
    "w8a8 in groups": (rounded(INT8, PER_TOKEN, 32), FLOATS),
    "w8a8, no whole tiles": (rounded(INT8, PER_TOKEN, rows=20), CODES),
    "w4a8": (rounded(INT4, PER_TOKEN), CODES),
    "w4a8, rows that eight does not divide": (rounded(INT4, PER_TOKEN, rows=20), CODES),
    "w4a8 in groups": (rounded(INT4, PER_TOKEN, 32), FLOATS),
    "w4a4": (rounded(INT4, INT4_INPUTS), FLOATS),
    "w4a4 rotated": (rounded(INT4, replace(INT4_INPUTS, rotated=True)), FLOATS),
    "w8a16": (rounded(INT8, WEIGHT_ONLY), CODES),
    "w8a16 in groups": (rounded(INT8, WEIGHT_ONLY, 32), CODES),
    "w8a16 with zeros": (rounded(INT8, WEIGHT_ONLY, symmetric=False), CODES),
    "w4a16": (rounded(INT4, WEIGHT_ONLY, 32), CODES),
    "w4a16 with zeros": (rounded(INT4, WEIGHT_ONLY, 32, symmetric=False), CODES),
    "w4a16 with real zeros": (hqq(torch.randn(OUT, WIDTH), Grid(INT4, (1, 64), False)), CODES),
    "w4a16 act-order": (with_order(rounded(INT4, WEIGHT_ONLY, 32)), CODES),
    "w4a16, rows that eight does not divide": (rounded(INT4, WEIGHT_ONLY, 32, rows=20), FLOATS),
    "w4a16 in groups of 16": (rounded(INT4, WEIGHT_ONLY, 16), FLOATS),
    "w2a16": (rounded(INT2, WEIGHT_ONLY, 64), CODES),
    "fp8": (rounded(FP8_E4M3, per_token(FP8_E4M3, 128), 128, block_rows=128), FLOATS),
    "fp8 weights": (rounded(FP8_E4M3, WEIGHT_ONLY), FLOATS),
    "hif8": (rounded(HIF8, per_token(HIF8)), FLOATS),
    "hif4": (rounded(HIF4, WEIGHT_ONLY, 4), FLOATS),
    "mxfp8": (rounded(MXFP8, per_token(MXFP8, 32), 32), FLOATS),
    "mxfp4": (rounded(MXFP4, per_token(MXFP8, 32), 32), FLOATS),
    "nf4": (rounded(NF4, WEIGHT_ONLY, 64), FLOATS),
}
# What a layer of experts holds otherwise than one matrix.
GROUPED = {"w4a8, rows that eight does not divide": FLOATS, "w8a16 in groups": FLOATS}
NOT_GROUPED = ("w8a8 static", "w4a16 act-order")
EXPERTS_OF = [name for name in LINEARS if name not in NOT_GROUPED]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a function, a dataclass or a tuple keeps alive."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            yield from tensors_of(cell.cell_contents)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def stored(product: Any) -> int:
    """Bytes of the storages behind a product, each once."""
    tensors = tensors_of(product)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_holds_what_is_counted_without_a_device(numerics, name):
    weight, is_float = LINEARS[name]
    counted = held(shapes_of(weight), torch.bfloat16, needs_body=True)
    product = prepare(weight.to(NPU), torch.bfloat16, needs_body=True)
    assert counted.num_bytes == stored(product)
    assert counted.is_float == is_float == (stored(product) == 2 * weight.codes.numel())


@pytest.mark.parametrize("name", EXPERTS_OF)
def test_experts_hold_what_is_counted_without_a_device(numerics, name):
    weight, is_float = LINEARS[name]
    is_float = GROUPED.get(name, is_float)
    counted = held_grouped([shapes_of(weight)] * EXPERTS, torch.bfloat16, needs_body=True)
    product = prepare_grouped([weight.to(NPU)] * EXPERTS, torch.bfloat16, needs_body=True)
    assert counted.num_bytes == stored(product)
    floats = 2 * EXPERTS * weight.codes.numel()
    assert counted.is_float == is_float == (stored(product) == floats)


def test_what_a_definition_would_hold_is_not_what_an_npu_holds(numerics):
    """The control: codes where floats are multiplied."""
    weight, _ = LINEARS["fp8"]
    product = prepare(weight.to(NPU), torch.bfloat16, needs_body=True)
    assert held(shapes_of(weight), torch.bfloat16).num_bytes < 0.6 * stored(product)


def shapes_of(weight: QuantizedWeight) -> QuantizedWeight:
    """The order of columns has values, which decide whether groups are alike."""
    return replace(weight.to(META), group_index=weight.group_index)
