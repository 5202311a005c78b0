"""The config_groups of compressed-tensors' quantization_config: read, checked, and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ascend.quantization.formats import FP8_E4M3, INT2, INT4, INT8, NumberFormat
from sglang_ascend.quantization.layouts.base import SettingError, block_setting, integer_setting
from sglang_ascend.quantization.weight import PER_TOKEN, WEIGHT_ONLY, InputKind, InputRule

FORMATS = {("int", 2): INT2, ("int", 4): INT4, ("int", 8): INT8, ("float", 8): FP8_E4M3}
# Formats of files whose tensors are read by their own names; the others hold floats or fp4.
KNOWN_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True)
class Group:
    """One config group.

    Attributes:
        targets: names of modules, regular expressions after "re:", or names of classes.
        input_rule: None for a static one.
        input_format: of the input's codes.
        block_structure: of the strategy "block" only.
    """

    targets: tuple[str, ...]
    number_format: NumberFormat
    symmetric: bool
    strategy: str
    group_size: int | None
    block_structure: tuple[int, int] | None
    any_order: bool
    input_rule: InputRule | None
    input_format: NumberFormat

    @property
    def name(self) -> str:
        is_float_input = self.input_rule is WEIGHT_ONLY
        inputs = 16 if is_float_input else self.input_format.bits
        number = "FP" if self.number_format is FP8_E4M3 else "W"
        size = "" if self.group_size is None else f" g{self.group_size}"
        static = " static" if self.input_rule is None else ""
        return f"{number}{self.number_format.bits}A{inputs} {self.strategy}{size}{static}"

    @property
    def is_per_tensor(self) -> bool:
        return self.strategy == "tensor"

    def block(self, out_features: int, in_features: int) -> tuple[int, int]:
        """(rows, columns) that one scale covers."""
        if self.strategy == "tensor":
            return out_features, in_features
        if self.strategy == "block":
            assert self.block_structure is not None
            return self.block_structure
        return 1, self.group_size or in_features


def read_groups(settings: Mapping[str, Any]) -> tuple[Group, ...]:
    """The groups, in order.

    Raises:
        SettingError: something in them is unknown.
    """
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise SettingError("config_groups", groups, "an object of groups")
    file_format = settings.get("format")
    return tuple(_read_group(group, file_format) for group in groups.values())


def _read_group(group: Any, file_format: Any) -> Group:
    if not isinstance(group, dict):
        raise SettingError("config_groups", group, "a group with targets and weights")
    file_format = group.get("format") or file_format
    if file_format not in KNOWN_FORMATS:
        raise SettingError("format", file_format, " or ".join(KNOWN_FORMATS))
    targets, weights = group.get("targets"), group.get("weights")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise SettingError("targets", targets, "a list of names")
    if not isinstance(weights, dict):
        raise SettingError("weights", weights, "an object")
    strategy = _strategy(weights)
    input_rule, input_format = _input_rule(group.get("input_activations"))
    return Group(
        targets=tuple(targets),
        number_format=_number_format(weights),
        symmetric=_flag(weights, "symmetric", True),
        strategy=strategy,
        group_size=integer_setting(weights, "group_size") if strategy == "group" else None,
        block_structure=block_setting(weights, "block_structure") if strategy == "block" else None,
        any_order=weights.get("actorder") in ("group", "dynamic", True),
        input_rule=input_rule,
        input_format=input_format,
    )


def _strategy(arguments: Mapping[str, Any]) -> str:
    strategy = arguments.get("strategy")
    if strategy is None:
        group_size = arguments.get("group_size")
        strategy = "tensor" if group_size is None else "group"
        strategy = "channel" if group_size == -1 else strategy
    if strategy not in STRATEGIES:
        raise SettingError("strategy", strategy, " or ".join(STRATEGIES))
    return strategy


def _number_format(arguments: Mapping[str, Any]) -> NumberFormat:
    kind, bits = arguments.get("type", "int"), arguments.get("num_bits", 8)
    number_format = FORMATS.get((kind, bits)) if type(bits) is int and type(kind) is str else None
    if number_format is None:
        raise SettingError("num_bits", f"{kind} {bits}", "int of 2, 4 or 8 bits or float of 8")
    return number_format


def _flag(arguments: Mapping[str, Any], name: str, default: bool) -> bool:
    value = arguments.get(name, default)
    if not isinstance(value, bool):
        raise SettingError(name, value, "true or false")
    return value


def _input_rule(arguments: Any) -> tuple[InputRule | None, NumberFormat]:
    """None and a number format for a static rule, whose scale is a tensor."""
    if arguments is None:
        return WEIGHT_ONLY, INT8
    if not isinstance(arguments, dict):
        raise SettingError("input_activations", arguments, "an object or null")
    number_format = _number_format(arguments)
    if not _flag(arguments, "dynamic", False):
        if arguments.get("strategy", "tensor") != "tensor":
            raise SettingError("strategy", arguments.get("strategy"), "tensor for a static input")
        return None, number_format
    if not _flag(arguments, "symmetric", True):
        raise SettingError("symmetric", False, "true for an input that is scaled per token")
    strategy, group_size = arguments.get("strategy"), None
    if strategy == "group":
        group_size = integer_setting(arguments, "group_size")
    elif strategy != "token":
        raise SettingError("strategy", strategy, "token or group for a dynamic input")
    if number_format is INT8 and group_size is None:
        return PER_TOKEN, number_format
    return InputRule(InputKind.PER_TOKEN, number_format, group_size), number_format
