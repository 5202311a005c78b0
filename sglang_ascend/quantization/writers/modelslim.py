"""Writes quantized weights as ModelSlim does; `modelslim` says what each type holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.quantization.formats import FP8_E4M3, INT2, INT3, INT4, INT8
from sglang_ascend.quantization.layouts import Layout, floats
from sglang_ascend.quantization.layouts.modelslim import (
    BESIDE_LINEARS,
    DESCRIPTION,
    FLOAT,
    ModelSlim,
    fold_static,
)
from sglang_ascend.quantization.layouts.packing import pack_nibbles
from sglang_ascend.quantization.weight import InputKind, QuantizedWeight
from sglang_ascend.quantization.writers.base import Writer

# scale_bias of these has a sum for each part of the input that a rank of SGLang may hold.
SPLIT_INPUTS = ("down_proj", "o_proj")
INPUT_PARTS = 16
# (bits and kind of the codes, of the input, whether that is rotated) -> type
TYPES = {
    (INT8, InputKind.STATIC, INT8, False): "W8A8",
    (INT8, InputKind.PER_TOKEN, INT8, False): "W8A8_DYNAMIC",
    (INT8, InputKind.PER_TOKEN, INT8, True): "W8A8_DYNAMIC_ROTATED",
    (INT4, InputKind.PER_TOKEN, INT8, False): "W4A8_DYNAMIC",
    (INT4, InputKind.PER_TOKEN, INT4, False): "W4A4_DYNAMIC",
    (INT4, InputKind.PER_TOKEN, INT4, True): "W4A4_DYNAMIC_ROTATED",
    (FP8_E4M3, InputKind.PER_TOKEN, FP8_E4M3, False): "WFP8AFP8_DYNAMIC",
    **{(codes, InputKind.NONE, INT8, False): "W8A16" for codes in (INT8, INT4, INT3, INT2)},
    **{
        (scheme.number_format, rule.kind, rule.number_format, False): name
        for name, scheme in floats.SCHEMES.items()
        if (rule := scheme.input_rule)
    },
}


class ModelSlimWriter(Writer):
    """Remembers the type of every tensor for the description.

    Args:
        previous: the layout of the checkpoint that is converted, if it is ModelSlim's too: the
            description keeps its order and what it says beside types, deq_scale its dtype.
    """

    name: ClassVar[str] = "modelslim"
    shard_name: ClassVar[str] = "quant_model_weights-{:05d}-of-{:05d}.safetensors"
    index_name: ClassVar[str] = "quant_model_weights.safetensors.index.json"
    single_name: ClassVar[str | None] = None
    metadata: ClassVar[dict[str, str] | None] = None

    def __init__(self, previous: ModelSlim | None = None) -> None:
        self._description = {} if previous is None else previous.description
        self._entries = {} if previous is None else previous.entries
        self._types: dict[str, str] = {}
        self._group_size = 0

    def keeps_own(self, source: Layout) -> bool:
        return isinstance(source, ModelSlim)

    def write_float(self, name: str, tensor: Tensor) -> Tensor:
        self._types[name] = self._description.get(name, FLOAT)
        return tensor

    def write(self, module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        weight, rule = weight.refined((1, weight.block[1])), weight.input_rule
        form = weight.number_format, rule.kind, rule.number_format, rule.rotated
        type_name = TYPES.get(form)
        problem = self._problem(weight, type_name)
        if type_name is None or problem is not None:
            raise CheckpointError(
                f"{shown(module)} {problem}, which ModelSlim's files cannot hold; "
                "convert to float32"
            )
        if type_name == "W8A8":
            tensors = self._static(module, weight)
        elif type_name == "W4A8_DYNAMIC":
            tensors = _nibbles(module, weight)
        elif type_name in floats.SCHEMES:
            tensors = floats.tensors_of(weight)
        else:
            tensors = {"weight": weight.codes, **_scales("weight_scale", "weight_offset", weight)}
        self._types |= {f"{module}.{suffix}": type_name for suffix in tensors}
        return tensors

    def _problem(self, weight: QuantizedWeight, type_name: str | None) -> str | None:
        rule, form = weight.input_rule, weight.number_format
        scheme = floats.SCHEMES.get(type_name or "")
        if type_name is None or rule.group_size != (scheme and rule.number_format.group_size):
            return (
                f"is {weight.number_format.name} with {rule.kind} {rule.number_format.name} input"
                f"{', rotated' * rule.rotated}"
            )
        if weight.group_index is not None:
            return "has its columns in groups of any order (act-order)"
        if type_name == "W8A8" and (weight.zero is not None or weight.scale.shape[1] != 1):
            return "is static and not symmetric per channel"
        if type_name == "W4A8_DYNAMIC" and weight.shape[0] % 2:
            return "is int4 with an odd number of rows"
        if scheme is not None and (weight.zero is not None or weight.shape[1] % form.unit):
            return f"is {form.name} with zero points or columns that {form.unit} does not divide"
        if form.group_size is not None and weight.block[1] != form.group_size:
            return f"is {form.name} in groups of {weight.block[1]}"
        if weight.scale.shape[1] > 1 and form.group_size is None:
            if self._group_size not in (0, weight.block[1]):
                return f"has groups of {weight.block[1]} beside others of {self._group_size}"
            self._group_size = weight.block[1]
        return None

    def _static(self, module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        tensors = {"weight": weight.codes, **fold_static(weight)}
        held = self._entries.get(f"{module}.deq_scale")
        if held is not None and held.dtype == "I64":
            tensors["deq_scale"] = tensors["deq_scale"].view(torch.int32).to(torch.int64)
        return tensors

    def order(self, names: Iterable[str]) -> list[str]:
        held = set(names)
        return [name for name in self.files()[DESCRIPTION] if name in held]

    def files(self) -> dict[str, Mapping[str, Any]]:
        description = {
            key: self._types.get(key, value)
            for key, value in self._description.items()
            if key in self._types or key not in self._entries
        }
        new = {key: value for key, value in self._types.items() if key not in self._description}
        narrowest = min(set(self._types.values()) - {FLOAT, *BESIDE_LINEARS}, default=FLOAT)
        ours = {
            "version": "1.0.0",
            "model_quant_type": narrowest,
            "metadata": {},
            "group_size": self._group_size,
            "optional": {},
        }
        return {DESCRIPTION: {**description, **new} if description else {**new, **ours}}


def _scales(scale: str, offset: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
    return {scale: weight.scale, offset: zero.to(torch.float32)}


def _nibbles(module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """W4A8: scale_bias is 8 times the sum of a row of the weight, which its kernels add."""
    values = weight.dequantize()
    out_features, in_features = weight.shape
    parts = INPUT_PARTS if module.endswith(SPLIT_INPUTS) and in_features % INPUT_PARTS == 0 else 1
    channel = weight if weight.scale.shape[1] == 1 else None
    tensors = {"weight": pack_nibbles(weight.codes)}
    if channel is not None:
        tensors |= _scales("weight_scale", "weight_offset", weight)
    else:
        ones = weight.scale.new_ones(out_features, 1)
        tensors |= {"weight_scale": ones, "weight_offset": torch.zeros_like(ones)}
        tensors |= _scales("weight_scale_second", "weight_offset_second", weight)
    tensors["scale_bias"] = 8 * values.unflatten(1, (parts, -1)).sum(2)
    return tensors
