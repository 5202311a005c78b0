"""compressed-tensors (llm-compressor): groups of modules in quantization_config, with arguments.

A module's tensors say that it is quantized, the group that targets it says how:

| codes | tensors beside weight_scale [out, groups], [out, 1], [1] or blocks |
|---|---|
| packed | weight_packed int32 [out, words], weight_shape, weight_zero_point packed along out |
| plain | weight int8 or float8_e4m3fn [out, in], weight_zero_point int8 of the scale's shape |
| either | weight_g_idx [in]; input_scale, input_zero_point of a static input |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.reader import PLAIN_FLOATS, TensorEntry
from sglang_ascend.quantization.layouts.base import Layout, ModuleTensors, Scheme, SettingError
from sglang_ascend.quantization.layouts.compressed_groups import Group, read_groups
from sglang_ascend.quantization.layouts.packing import unpack_words
from sglang_ascend.quantization.weight import InputKind, InputRule, QuantizedWeight

SCALE, ZERO, GROUP_INDEX = "weight_scale", "weight_zero_point", "weight_g_idx"
INPUTS = ("input_scale", "input_zero_point")
CLASS = re.compile(r"[A-Z]\w*")
Value = TypeVar("Value")


class CompressedTensors(Layout):
    name: ClassVar[str] = "compressed-tensors"

    def __init__(self, entries: Mapping[str, TensorEntry], settings: Mapping[str, Any]) -> None:
        super().__init__(entries)
        ignored = settings.get("ignore") or []
        if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
            raise SettingError("ignore", ignored, "a list of names")
        self._ignored = _Names(dict.fromkeys(ignored, True))
        groups = read_groups(settings)
        _refuse_transforms(settings.get("transform_config"))
        targeted: dict[str, Group] = {}
        for group in groups:
            for target in group.targets:  # of several that match, the first, as in the library
                targeted.setdefault(target, group)
        self._targeted = _Names(targeted)
        # A target such as Linear names a class: it takes every module that no other target names.
        self._default = next((g for g in groups if any(map(CLASS.fullmatch, g.targets))), None)

    def scheme(self, module: str) -> Scheme | None:
        packed = self.holds(module, "weight_packed")
        weight = self.entries.get(f"{module}.weight")
        if weight is None and not packed and not self.holds(module, SCALE):
            return None
        if weight is not None and weight.dtype in PLAIN_FLOATS and not self.holds(module, SCALE):
            return None
        if weight is not None and len(weight.shape) < 2:
            return None
        group = self._group(module)
        if weight is None or packed:
            required = ["weight_packed", "weight_shape", SCALE]
        else:
            required = ["weight", SCALE]
        if not group.symmetric:
            required.append(ZERO)
        if group.any_order:
            required.append(GROUP_INDEX)
        if group.input_rule is None:
            required.append(INPUTS[0])
        scheme = Scheme(
            group.name,
            group.number_format,
            tuple(required),
            tuple(suffix for suffix in (ZERO, *INPUTS, GROUP_INDEX) if suffix not in required),
            group.input_rule,
            group.group_size,
        )
        return self._complete(module, scheme)

    def _group(self, module: str) -> Group:
        if self._ignored.find(module):
            raise CheckpointError(
                f"{shown(module)} holds quantized tensors although config.json ignores it in its "
                "quantization_config; take it out of that list or restore the float weight"
            )
        group = self._targeted.find(module) or self._default
        if group is not None:
            return group
        raise CheckpointError(
            f"{shown(module)} holds quantized tensors and is no target in the quantization_config "
            "of config.json; restore the config.json it was written with"
        )

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        scheme = self.scheme(module)
        if scheme is None:
            return super().read(module, tensors)
        group, held = self._group(module), ModuleTensors(module, tensors)
        packed = "weight_packed" in scheme.required
        codes = _unpack(held, group) if packed else held.codes("weight", group.number_format)
        out_features, in_features = codes.shape
        block = group.block(out_features, in_features)
        shape = -(-out_features // block[0]), -(-in_features // block[1])
        given = (1,) if shape == (1, 1) and group.is_per_tensor else shape
        scale = held.scale(SCALE, *given).reshape(shape)
        zero = None
        if not group.symmetric:
            zero = (
                _unpack_zero(held, group, shape)
                if packed
                else held.take(ZERO, (torch.int8,), *given)
            )
            zero = zero.reshape(shape).to(torch.int32)
        elif held.has(ZERO) and bool(held.take(ZERO, (torch.int8,), *given).any()):
            raise held.error(ZERO, "is not 0, and config.json calls the weight symmetric")
        if group.input_rule is not None and held.has(INPUTS[0]):
            raise held.error(INPUTS[0], "is there, and config.json has no static inputs")
        group_index = None
        if held.has(GROUP_INDEX):
            group_index = _group_index(held, in_features, shape[1])
            if not group.any_order:
                _refuse_any_order(held, group_index, block[1])
                group_index = None
        return QuantizedWeight(
            codes=codes,
            scale=scale,
            zero=zero,
            block=block,
            number_format=group.number_format,
            input_rule=group.input_rule or _static(held, group),
            group_index=group_index,
        )


def _refuse_transforms(config: Any) -> None:
    """Of inputs, queries or caches at run time; those of weights are in the weights."""
    if not config:
        return
    groups = config.get("config_groups", {}) if isinstance(config, dict) else None
    if not isinstance(groups, dict):
        raise SettingError("transform_config", config, "an object of groups")
    for group in groups.values():
        applied = group.get("apply") if isinstance(group, dict) else None
        places = [one.get("location") for one in applied or () if isinstance(one, dict)]
        if not places or not all(str(place).startswith("weight_") for place in places):
            raise SettingError("transform_config", places, "transforms of weights alone")


class _Names(Generic[Value]):
    """Values by the name of a module, or by a regular expression after "re:"."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._exact = values
        self._patterns: list[tuple[re.Pattern[str], Value]] = []
        for target, value in values.items():
            if target.startswith("re:"):
                try:
                    self._patterns.append((re.compile(target.removeprefix("re:")), value))
                except (re.error, OverflowError, RecursionError) as error:
                    expected = "a regular expression after re:"
                    raise SettingError("targets or ignore", target, expected) from error

    def find(self, module: str) -> Value | None:
        if module in self._exact:
            return self._exact[module]
        return next((value for pattern, value in self._patterns if pattern.match(module)), None)


def _unpack(held: ModuleTensors, group: Group) -> Tensor:
    """int8 [out, in] from words along the input."""
    shape = held.take("weight_shape", (torch.int64, torch.int32), 2).tolist()
    bits = group.number_format.bits
    out_features, in_features = shape
    if min(shape) < 1:
        raise held.error("weight_shape", f"is {shape}")
    words = -(-in_features * bits // 32)
    packed = held.take("weight_packed", (torch.int32,), out_features, words)
    codes = unpack_words(packed, bits, 1)[:, :in_features] - (1 << (bits - 1))
    return codes.to(torch.int8)


def _unpack_zero(held: ModuleTensors, group: Group, shape: tuple[int, int]) -> Tensor:
    bits = group.number_format.bits
    packed = held.take(ZERO, (torch.int32,), -(-shape[0] * bits // 32), shape[1])
    return unpack_words(packed, bits, 0)[: shape[0]] - (1 << (bits - 1))


def _static(held: ModuleTensors, group: Group) -> InputRule:
    offset = 0.0
    if held.has(INPUTS[1]):
        offset = float(held.take(INPUTS[1], (torch.int8, torch.float8_e4m3fn), 1).to(torch.float32))
    return InputRule(
        InputKind.STATIC, group.input_format, None, float(held.scale(INPUTS[0], 1)), offset
    )


def _refuse_any_order(held: ModuleTensors, group_index: Tensor, group_size: int) -> None:
    in_order = torch.arange(len(group_index)) // group_size
    if not torch.equal(group_index, in_order):
        raise held.error(GROUP_INDEX, "has groups of any order, and config.json has no actorder")


def _group_index(held: ModuleTensors, in_features: int, num_groups: int) -> Tensor:
    group_index = held.take(GROUP_INDEX, (torch.int32, torch.int64), in_features).to(torch.int64)
    if bool(((group_index < 0) | (group_index >= num_groups)).any()):
        raise held.error(GROUP_INDEX, f"names a group outside of the {num_groups} that there are")
    return group_index
