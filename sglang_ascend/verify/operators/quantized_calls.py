"""Calls of products with quantized weights, each as the device's own body has prepared it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_ascend.ops import quantized
from sglang_ascend.ops.dispatch import REFERENCE, Op
from sglang_ascend.ops.quantized.npu.weights import Matrix
from sglang_ascend.verify.operators.operator_call import BF16, HIDDEN, ROWS, Arguments, OperatorCall


@dataclass(frozen=True)
class Loaded:
    """A weight as ``prepare`` makes it: on an NPU its body, as for a server; elsewhere the
    reference, for the CPU's own bodies have forms of theirs."""

    prepare: Op
    args: tuple[Any, ...]
    options: dict[str, Any]

    def on(self, device: str) -> Any:
        prepare = self.prepare.implementation(REFERENCE) if device == "cpu" else self.prepare
        return prepare(*self.args, **self.options)


def loaded(prepare: Op, *args: Any, **options: Any) -> Loaded:
    return Loaded(prepare, args, options)


def rows(dtype: torch.dtype) -> Arguments:
    return (torch.randn(ROWS, HIDDEN).to(dtype),), {}


def codes_of(*shape: int, bits: int = 8) -> torch.Tensor:
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape).to(torch.int8)


def integer_linear(dtype: torch.dtype) -> Arguments:
    weight = loaded(quantized.prepare_integer, codes_of(256, HIDDEN), torch.rand(256, 1) / HIDDEN)
    return (*rows(dtype)[0], weight), {}


def static_integer_linear(dtype: torch.dtype) -> Arguments:
    """A scale whose inverse is exact, with which a body may multiply."""
    static = {"input_scale": torch.tensor([0.03125]), "input_offset": torch.tensor([-3.0])}
    static["quant_bias"] = torch.randint(-9999, 9999, (256,)).int()
    codes, scale = codes_of(256, HIDDEN), torch.rand(256, 1) / HIDDEN
    return (*rows(dtype)[0], loaded(quantized.prepare_integer, codes, scale, **static)), {}


def grouped_integer_linear(dtype: torch.dtype) -> Arguments:
    weight = loaded(
        quantized.prepare_integer, codes_of(4, 256, HIDDEN), torch.rand(4, 256, 1) / HIDDEN
    )
    return (*rows(dtype)[0], weight, torch.tensor([9, 0, 20, 3])), {}


def int8_weight(dtype: torch.dtype) -> Arguments:
    scale = (torch.rand(256, 1) / HIDDEN).bfloat16().float()
    return (codes_of(256, HIDDEN), scale), {}


def grouped_weight_only_linear(dtype: torch.dtype) -> Arguments:
    scale = (torch.rand(4, 256, 1) / HIDDEN).bfloat16().float()
    weight = loaded(quantized.prepare_weight_only, codes_of(4, 256, HIDDEN), scale)
    return (*rows(dtype)[0], weight, torch.tensor([9, 0, 20, 3])), {}


def int4_weight(dtype: torch.dtype) -> Arguments:
    groups = (256, HIDDEN // 32)
    zero = codes_of(*groups, bits=4)
    # Scales and zeros that bfloat16 holds, as the device's operator takes them.
    scale = (torch.rand(groups) / HIDDEN).bfloat16().float()
    return (codes_of(256, HIDDEN, bits=4), scale, zero), {"bits": 4, "group_size": 32}


def weight_only_linear(dtype: torch.dtype) -> Arguments:
    (_, scale, zero), _ = int4_weight(dtype)
    weight = loaded(
        quantized.prepare_weight_only, codes_of(256, HIDDEN), scale, zero, group_size=32
    )
    return (*rows(dtype)[0], weight), {}


def what_was_quantized(weight: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Scales, zeros and the starts of groups, as the definition has them. The packed codes are the
    body's own; what it multiplies them to is compared elsewhere."""
    scale, zero = weight.scale, getattr(weight, "zero", None)
    if isinstance(weight.packed, Matrix):
        scale = _by_output(weight.packed.scale)
        zero = None if weight.packed.offset is None else -_by_output(weight.packed.offset)
    found = scale, zero, getattr(weight, "starts", None)
    return [tensor for tensor in found if tensor is not None]


def _by_output(values: torch.Tensor) -> torch.Tensor:
    """[(groups,) out] -> [out, groups]"""
    return values.view(-1, values.shape[-1]).T


def product_and_rows(product: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Not the weight, which has a form of its own on each device."""
    return product, args[0]


def grouped_int4_linear(dtype: torch.dtype) -> Arguments:
    codes, scale = codes_of(4, 256, HIDDEN, bits=4), torch.rand(4, 256, 1) / HIDDEN
    weight = loaded(quantized.prepare_integer, codes, scale, bits=4)
    return (*rows(dtype)[0], weight, torch.tensor([9, 0, 20, 3])), {}


def int4_only_linear(dtype: torch.dtype) -> Arguments:
    args, options = int4_weight(dtype)
    return (*rows(dtype)[0], loaded(quantized.prepare_weight_only, *args, **options)), {}


def grouped_int4_only_linear(dtype: torch.dtype) -> Arguments:
    (codes, scale, zero), options = int4_weight(dtype)
    stacked = (of.expand(4, *of.shape).contiguous() for of in (codes, scale, zero.float()))
    weight = loaded(quantized.prepare_weight_only, *stacked, **options)
    return (*rows(dtype)[0], weight, torch.tensor([9, 0, 20, 3])), {}


QUANTIZED = {
    "quantized.grouped_integer_linear": OperatorCall(
        grouped_integer_linear, (BF16,), compared=product_and_rows
    ),
    "quantized.grouped_weight_only_linear": OperatorCall(
        grouped_weight_only_linear, (BF16,), compared=product_and_rows
    ),
    "quantized.integer_linear": OperatorCall(integer_linear, (BF16,), compared=product_and_rows),
    "quantized.prepare_integer": OperatorCall(
        int8_weight, (BF16,), at_load=True, compared=what_was_quantized
    ),
    "quantized.prepare_weight_only": OperatorCall(
        int4_weight, (BF16,), at_load=True, compared=what_was_quantized
    ),
    "quantized.weight_only_linear": OperatorCall(
        weight_only_linear, (BF16,), compared=product_and_rows
    ),
}
# Other forms of some of them, which take other operators of the device, or are packed.
INT4 = {
    "quantized.grouped_integer_linear": OperatorCall(
        grouped_int4_linear, (BF16,), compared=product_and_rows
    ),
    "quantized.grouped_weight_only_linear": OperatorCall(
        grouped_int4_only_linear, (BF16,), compared=product_and_rows
    ),
    "quantized.weight_only_linear": OperatorCall(
        int4_only_linear, (BF16,), compared=product_and_rows
    ),
}
STATIC_INPUT = {
    "quantized.integer_linear": OperatorCall(
        static_integer_linear, (BF16,), compared=product_and_rows
    )
}
