"""Writes quantized weights as compressed-tensors does, and the config groups that say how."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.quantization.formats import FP8_E4M3, INT8, NumberFormat
from sglang_ascend.quantization.layouts.packing import pack_words
from sglang_ascend.quantization.weight import InputKind, InputRule, QuantizedWeight
from sglang_ascend.quantization.writers.base import Writer


class CompressedTensorsWriter(Writer):
    """Modules of equal arguments make a config group; one alone targets Linear, as is customary."""

    name: ClassVar[str] = "compressed-tensors"

    def __init__(self) -> None:
        self._groups: list[tuple[dict[str, Any], dict[str, None]]] = []
        self._float_modules: dict[str, None] = {}

    def write_float(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 2 and name.endswith(".weight"):
            self._float_modules[name.removesuffix(".weight")] = None
        return tensor

    def write(self, module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        if weight.input_rule.rotated:
            raise _cannot_hold(module, "rotated inputs")
        weight = _of_known_blocks(module, weight)
        arguments = {
            "format": _format(weight),
            "input_activations": _input_arguments(weight.input_rule),
            "weights": _weight_arguments(weight),
        }
        self._remember(module, arguments)
        is_packed = arguments["format"] == "pack-quantized"
        tensors = _packed(weight) if is_packed else {"weight": weight.codes}
        tensors["weight_scale"] = weight.scale
        if weight.zero is not None:
            zero = _integer_zero(module, weight)
            bits = weight.number_format.bits
            half = 1 << (bits - 1)
            packed = pack_words(zero.to(torch.int16) + half, bits, 0)
            tensors["weight_zero_point"] = packed if is_packed else zero
        if weight.group_index is not None:
            tensors["weight_g_idx"] = weight.group_index.to(torch.int32)
        if weight.input_rule.kind == InputKind.STATIC:
            tensors |= _static_input(module, weight.input_rule)
        if weight.bias is not None:
            tensors["bias"] = weight.bias
        return tensors

    def _remember(self, module: str, arguments: dict[str, Any]) -> None:
        for known, modules in self._groups:
            if known == arguments:
                modules[module] = None
                return
        self._groups.append((arguments, {module: None}))

    def config(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        formats = {arguments["format"] for arguments, _ in self._groups}
        is_single = len(self._groups) == 1
        settings = {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{number}": {
                    "targets": ["Linear"] if is_single else sorted(modules),
                    "output_activations": None,
                    **arguments,
                }
                for number, (arguments, modules) in enumerate(self._groups)
            },
            "ignore": sorted(self._float_modules),
            "kv_cache_scheme": None,
        }
        return {**fields, "quantization_config": settings} if self._groups else dict(fields)


def _of_known_blocks(module: str, weight: QuantizedWeight) -> QuantizedWeight:
    """Only FP8 has blocks of rows, and groups divide the input: the last one cannot be cut."""
    rows, columns = weight.block
    in_features = weight.shape[1]
    if not weight.number_format.is_integer and weight.number_format is not FP8_E4M3:
        raise _cannot_hold(module, f"{weight.number_format.name} weights")
    if weight.number_format is FP8_E4M3 and rows > 1:
        return weight
    if weight.scale.shape[1] > 1 and in_features % columns:
        if weight.group_index is not None:
            raise _cannot_hold(module, f"{in_features} inputs in groups of {columns} of any order")
        columns = gcd(columns, in_features)
    return weight.refined((1, columns))


def _format(weight: QuantizedWeight) -> str:
    is_weight_only = weight.input_rule.kind == InputKind.NONE
    if weight.number_format is FP8_E4M3:
        return "naive-quantized" if is_weight_only else "float-quantized"
    is_plain = weight.number_format is INT8 and not is_weight_only
    return "int-quantized" if is_plain else "pack-quantized"


def _number_arguments(number_format: NumberFormat) -> dict[str, Any]:
    kind = "int" if number_format.is_integer else "float"
    return {"num_bits": number_format.bits, "type": kind}


def _weight_arguments(weight: QuantizedWeight) -> dict[str, Any]:
    if weight.block[0] > 1:
        strategy = "block"
    else:
        strategy = "channel" if weight.scale.shape[1] == 1 else "group"
    return {
        **_number_arguments(weight.number_format),
        "symmetric": weight.zero is None,
        "strategy": strategy,
        "group_size": weight.block[1] if strategy == "group" else None,
        "block_structure": list(weight.block) if strategy == "block" else None,
        "actorder": None if weight.group_index is None else "group",
        "dynamic": False,
    }


def _input_arguments(rule: InputRule) -> dict[str, Any] | None:
    if rule.kind == InputKind.NONE:
        return None
    is_static = rule.kind == InputKind.STATIC
    grouped = "token" if rule.group_size is None else "group"
    return {
        **_number_arguments(rule.number_format),
        "symmetric": not is_static or rule.offset == 0,
        "strategy": "tensor" if is_static else grouped,
        "group_size": rule.group_size,
        "dynamic": not is_static,
    }


def _packed(weight: QuantizedWeight) -> dict[str, Tensor]:
    bits = weight.number_format.bits
    codes = weight.codes.to(torch.int16) + (1 << (bits - 1))
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {"weight_packed": pack_words(codes, bits, 1), "weight_shape": shape}


def _integer_zero(module: str, weight: QuantizedWeight) -> Tensor:
    """int8, of the scale's shape."""
    assert weight.zero is not None
    number_format, zero = weight.number_format, weight.zero.to(torch.float32)
    in_range = (zero >= number_format.minimum) & (zero <= number_format.maximum)
    if not number_format.is_integer or not bool((in_range & (zero == zero.round())).all()):
        raise _cannot_hold(module, f"zero points that are no {number_format.name}")
    return zero.to(torch.int8)


def _static_input(module: str, rule: InputRule) -> dict[str, Tensor]:
    offset = rule.offset or 0.0
    if not INT8.minimum <= offset <= INT8.maximum or offset != round(offset):
        raise _cannot_hold(module, f"an input offset of {offset}")
    tensors = {"input_scale": torch.tensor([rule.scale])}
    if offset:
        tensors["input_zero_point"] = torch.tensor([int(offset)], dtype=torch.int8)
    return tensors


def _cannot_hold(module: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{shown(module)} has {what}, which compressed-tensors cannot hold; convert to float32"
    )
