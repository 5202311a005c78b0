"""ModelSlim, Huawei's quantizer: quant_model_description.json names the type of every tensor.

The type of `M.weight` is that of module M. Weights are [out, in]; a type that is none of SCHEMES is
refused, because its weight would be read as something else.

| type | tensors beside int8 `weight` |
|---|---|
| W8A8_DYNAMIC, W8A16, W4A4_DYNAMIC | weight_scale, weight_offset [out, groups] |
| W8A8_DYNAMIC_ROTATED, W4A4_DYNAMIC_ROTATED | the same, of the rotated weight |
| WFP8AFP8_DYNAMIC | the same; weight is float8_e4m3fn |
| W8A8 | deq_scale = weight scale * input_scale, quant_bias, input_scale, input_offset |
| W8A8_MIX | both of the above: static in decode, per token in prefill; read as per token |
| W4A8_DYNAMIC | weight is [out / 2, in]; scale_bias; weight_scale_second where there are groups |

The rotated types are this package's: `transforms.rotation` says what inputs are multiplied by.
Microscaling formats, HiFloat8, HiFloat4 and NF4 are described in `floats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.reader import TensorEntry
from sglang_ascend.checkpoint.values import is_all_zero
from sglang_ascend.quantization.formats import FP8_E4M3, INT4, INT8
from sglang_ascend.quantization.layouts import floats
from sglang_ascend.quantization.layouts.base import Layout, ModuleTensors, Scheme, spread_groups
from sglang_ascend.quantization.layouts.packing import unpack_nibbles
from sglang_ascend.quantization.weight import (
    PER_TOKEN,
    WEIGHT_ONLY,
    InputKind,
    InputRule,
    QuantizedWeight,
)

DESCRIPTION = "quant_model_description.json"
FLOAT = "FLOAT"
# Types of tensors that no product of a linear reads: scales of an int8 KV cache and of attention.
BESIDE_LINEARS = frozenset({"C8", "FAQuant"})

_turned = partial(replace, rotated=True)
_CHANNEL = ("weight", "weight_scale", "weight_offset")
_STATIC = ("weight", "quant_bias", "input_scale", "input_offset", "deq_scale")
_FP8_PER_TOKEN = InputRule(InputKind.PER_TOKEN, FP8_E4M3)
_INT4_PER_TOKEN = InputRule(InputKind.PER_TOKEN, INT4)
_SECOND = ("weight_scale_second", "weight_offset_second")
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("W8A8", INT8, _STATIC, input_rule=None),
        Scheme("W8A8_DYNAMIC", INT8, _CHANNEL, input_rule=PER_TOKEN),
        Scheme("W8A8_MIX", INT8, (*_CHANNEL, *_STATIC[1:]), input_rule=PER_TOKEN),
        Scheme("W8A16", INT8, _CHANNEL, input_rule=WEIGHT_ONLY),
        Scheme("W4A8_DYNAMIC", INT4, (*_CHANNEL, "scale_bias"), _SECOND, PER_TOKEN),
        Scheme("W4A4_DYNAMIC", INT4, _CHANNEL, input_rule=_INT4_PER_TOKEN),
        Scheme("W8A8_DYNAMIC_ROTATED", INT8, _CHANNEL, input_rule=_turned(PER_TOKEN)),
        Scheme("W4A4_DYNAMIC_ROTATED", INT4, _CHANNEL, input_rule=_turned(_INT4_PER_TOKEN)),
        Scheme("WFP8AFP8_DYNAMIC", FP8_E4M3, _CHANNEL, input_rule=_FP8_PER_TOKEN),
        *floats.SCHEMES.values(),
    )
}


class ModelSlim(Layout):
    name: ClassVar[str] = "modelslim"

    def __init__(
        self, entries: Mapping[str, TensorEntry], description: Mapping[str, Any], path: object
    ) -> None:
        super().__init__(entries)
        self.description, self._path = description, shown(path)
        group_size = description.get("group_size", 0)
        if type(group_size) is not int or group_size < 0:
            raise CheckpointError(
                f"{self._path} has group_size = {shown(group_size)}; set the integer that the "
                "model was quantized with, 0 for none"
            )
        self._group_size = group_size or None

    def scheme(self, module: str) -> Scheme | None:
        name = f"{module}.weight"
        if name not in self.entries:
            return None
        type_name = self.type_of(name)
        if type_name == FLOAT:
            return None
        scheme = SCHEMES.get(type_name)
        if scheme is None:
            raise CheckpointError(
                f"{self._path} gives {shown(name)} the type {shown(type_name)} and known are "
                f"FLOAT, {', '.join(SCHEMES)}; quantize that module to one of these"
            )
        return self._complete(module, scheme)

    def schemes(self) -> dict[str, Scheme]:
        for name in self.entries:
            self.type_of(name)
        for name in self.description:
            if name.endswith(".weight") and name not in self.entries:
                raise CheckpointError(
                    f"{shown(name)} is missing although {self._path} gives its type; "
                    "copy or download the complete checkpoint again"
                )
        return super().schemes()

    def type_of(self, name: str) -> str:
        """The type of the tensor `name`.

        Raises:
            CheckpointError: the description has none, or the tensor scales or shifts the input of a
                linear.
        """
        type_name = self.description.get(name)
        if not isinstance(type_name, str):
            raise CheckpointError(
                f"{self._path} gives no type for {shown(name)}; copy both files again from one and "
                "the same checkpoint"
            )
        if name.endswith(".div.mul_scale"):
            raise CheckpointError(
                f"{shown(name)} scales the input of a linear at run time, which is not served; "
                "quantize the model with fused smoothing"
            )
        if name.endswith("norm.bias") and not is_all_zero(self.entries[name]):
            raise CheckpointError(
                f"{shown(name)} shifts the input of linears (anti-outlier m4), which is not "
                "served; quantize the model with another anti-outlier method"
            )
        return type_name

    def is_own(self, name: str) -> bool:
        return self.description.get(name) in BESIDE_LINEARS

    def _is_unexplained(self, entry: TensorEntry) -> bool:
        return not self.is_own(entry.name) and super()._is_unexplained(entry)

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        scheme = self.scheme(module)
        if scheme is None:
            return super().read(module, tensors)
        held = ModuleTensors(module, tensors)
        if scheme.name == "W8A8":
            return _read_static(held)
        if scheme.name in floats.SCHEMES:
            return self._read_floats(held, scheme)
        if scheme.name == "W4A8_DYNAMIC":
            codes = unpack_nibbles(held.codes("weight", INT8))
            held.finite("scale_bias", codes.shape[0], None)
        else:
            codes = held.codes("weight", scheme.number_format)
        return self._read_channel(held, codes, scheme)

    def _read_channel(self, held: ModuleTensors, codes: Tensor, scheme: Scheme) -> QuantizedWeight:
        """Scales of a channel, of groups, or (W4A8) the product of both."""
        out_features, in_features = codes.shape
        suffix = "weight_scale"
        scale = held.scale(suffix, out_features, None)
        zero = held.zero("weight_offset", *scale.shape)
        if held.has("weight_scale_second"):
            suffix = "weight_scale_second"
            first = held.scale("weight_scale", out_features, 1)
            scale = first * held.scale(suffix, out_features, None)
            zero = held.zero("weight_offset_second", *scale.shape)
        block = self._block(held, suffix, scale.shape[1], in_features)
        assert scheme.input_rule is not None
        return QuantizedWeight(codes, scale, zero, block, scheme.number_format, scheme.input_rule)

    def _read_floats(self, held: ModuleTensors, scheme: Scheme) -> QuantizedWeight:
        form = scheme.number_format
        codes = floats.read_codes(held, form)
        scale = floats.read_scale(held, form, codes.shape)
        block = (1, form.group_size or 0)
        if form.group_size is None:
            block = self._block(held, "weight_scale", scale.shape[1], codes.shape[1])
        assert scheme.input_rule is not None
        return QuantizedWeight(codes, scale, None, block, form, scheme.input_rule)

    def _block(
        self, held: ModuleTensors, suffix: str, num_groups: int, in_features: int
    ) -> tuple[int, int]:
        if num_groups == 1:
            return 1, in_features
        if self._group_size is None or num_groups != spread_groups(in_features, self._group_size):
            raise held.error(
                suffix,
                f"has {num_groups} groups for {in_features} columns, which is not the group_size "
                f"{self._group_size or 0} of {DESCRIPTION}",
            )
        return 1, self._group_size


def _read_static(held: ModuleTensors) -> QuantizedWeight:
    """W8A8: y = (codes @ q(x) + quant_bias) * deq_scale, with q(x) = round(x / scale + offset).

    quant_bias = round(bias / deq_scale - sum(codes) * offset), so what it is above the sum is the
    bias; less than one unit of it is rounding.
    """
    codes = held.codes("weight", INT8)
    out_features, in_features = codes.shape
    input_scale = held.scale("input_scale", 1)
    input_offset = held.finite("input_offset", 1)
    deq_scale = held.take("deq_scale", (torch.int64, torch.float32), out_features)
    if deq_scale.dtype == torch.int64:  # the bits of a float32, where the model was not bf16
        if bool((deq_scale >> 32).any()):
            raise held.error("deq_scale", "holds more than the bits of a float32")
        deq_scale = deq_scale.to(torch.int32).view(torch.float32)
    held.positive("deq_scale", deq_scale)
    quant_bias = held.take("quant_bias", (torch.int32,), out_features).to(torch.float64)
    units = quant_bias + codes.sum(1, dtype=torch.int64) * input_offset.to(torch.float64)
    has_bias = bool((units.abs() > 0.5).any())
    return QuantizedWeight(
        codes=codes,
        scale=(deq_scale / input_scale).unsqueeze(1),
        zero=None,
        block=(1, in_features),
        number_format=INT8,
        input_rule=InputRule(
            InputKind.STATIC, scale=float(input_scale), offset=float(input_offset)
        ),
        bias=(units * deq_scale).to(torch.float32) if has_bias else None,
    )


def fold_static(weight: QuantizedWeight) -> dict[str, Tensor]:
    """What W8A8 has beside the codes of `weight`, by suffix: the inverse of `_read_static`."""
    rule = weight.input_rule
    parts = (rule.scale, rule.offset)
    input_scale, input_offset = (weight.scale.new_tensor([part]) for part in parts)
    deq_scale = weight.scale[:, 0] * input_scale
    bias = torch.zeros_like(deq_scale) if weight.bias is None else weight.bias
    step, sums = deq_scale, weight.codes.sum(1, dtype=torch.int64)
    if not sums.is_meta:  # float64 is not on every device
        bias, step, sums = bias.cpu(), step.cpu(), sums.cpu()
    quant_bias = (bias.double() / step - sums.double() * (rule.offset or 0.0)).round()
    return {
        "quant_bias": quant_bias.to(deq_scale.device, torch.int32),
        "input_scale": input_scale,
        "input_offset": input_offset,
        "deq_scale": deq_scale,
    }
