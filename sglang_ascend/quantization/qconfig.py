"""The scheme of one linear, in the words of ModelSlim's `qconfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from sglang_ascend.quantization.formats import FORMATS, INT8, NumberFormat
from sglang_ascend.quantization.solve import Grid
from sglang_ascend.quantization.weight import (
    PER_TOKEN,
    WEIGHT_ONLY,
    InputKind,
    InputRule,
    QuantizedWeight,
)

# Formats of inputs that weights of a format go with, beside float ones.
INPUTS = {
    "int8": ("int8",), "int4": ("int8", "int4"), "fp8_e4m3": ("fp8_e4m3",), "hif8": ("hif8",),
    "hif4": ("hif4",), "mxfp8": ("mxfp8",), "mxfp4": ("mxfp4", "mxfp8"),
}  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Extension(_Strict):
    """What a method takes beside ModelSlim's four words."""

    group_size: int = Field(default=128, ge=1)
    block_size: int = Field(default=128, ge=1)
    damping: float = Field(default=0.01, gt=0)
    act_order: bool = False
    scale_search: bool = False
    max_error: float | None = Field(default=None, gt=0)
    rotation: bool = False


def _check_blocks(scope: str, form: NumberFormat) -> None:
    if form.group_size and scope != "per_block":
        raise ValueError(f"{form.name} has blocks of its own: its scope is per_block")


class InputSpec(_Strict):
    """`act`: what the product does to its input."""

    scope: Literal["per_token", "per_group", "per_block", "per_tensor"]
    dtype: Literal["int8", "int4", "fp8_e4m3", "hif8", "hif4", "mxfp8", "mxfp4"]
    symmetric: bool = True
    method: Literal["minmax"] = "minmax"
    ext: Extension = Extension()

    @model_validator(mode="after")
    def _has_a_rule(self) -> InputSpec:
        for name in ("act_order", "damping", "scale_search"):
            if getattr(self.ext, name) != Extension.model_fields[name].default:
                raise ValueError(f"{name} is an ext of weight")
        if self.scope == "per_group" and self.dtype != "fp8_e4m3":
            raise ValueError("inputs are rounded in groups only to fp8_e4m3")
        _check_blocks(self.scope, self.number_format)
        if self.scope == "per_block" and not self.number_format.group_size:
            raise ValueError(f"inputs in {self.dtype} are not scaled per_block")
        if self.scope == "per_tensor" and self.dtype != "int8":
            raise ValueError("a static input (per_tensor) is int8")
        if self.scope != "per_tensor" and not self.symmetric:
            raise ValueError("an input that is scaled at run time is symmetric")
        if self.scope != "per_token" and self.ext.max_error is not None:
            raise ValueError("max_error is of inputs that are scaled per_token")
        if self.ext.rotation and (not self.number_format.is_integer or self.scope != "per_token"):
            raise ValueError("rotation is of int8 and int4 inputs that are scaled per_token")
        if self.ext.rotation and self.ext.max_error is not None:
            raise ValueError("rotation goes without max_error")
        return self

    @property
    def number_format(self) -> NumberFormat:
        return FORMATS[self.dtype]


class WeightSpec(_Strict):
    """`weight`: its grid, and the method that picks the codes."""

    scope: Literal["per_channel", "per_group", "per_block"]
    dtype: Literal[
        "int8", "int4", "int3", "int2", "fp8_e4m3",
        "hif8", "hif4", "mxfp8", "mxfp8_e5m2", "mxfp4", "nf4",
    ]  # fmt: skip
    symmetric: bool = True
    method: Literal["minmax", "mse", "gptq", "hqq", "lwc", "qoq"] = "minmax"
    ext: Extension = Extension()

    @model_validator(mode="after")
    def _has_a_grid(self) -> WeightSpec:
        _check_blocks(self.scope, self.number_format)
        if self.grid.block[0] != 1 and self.method == "gptq":
            raise ValueError("gptq corrects row by row, so its scope is per_channel or per_group")
        if self.method != "minmax" or self.ext.scale_search:
            self.grid.check_searchable()
        if self.ext.rotation:
            raise ValueError("rotation is an ext of act: weights are rotated with their inputs")
        if self.ext.max_error is not None:
            raise ValueError("max_error is an ext of act: it leaves inputs float")
        if self.method in ("hqq", "lwc", "qoq"):
            self._check_integers()
        return self

    def _check_integers(self) -> None:
        """
        Raises:
            ValueError: the method does not have this grid.
        """
        if not self.number_format.is_integer or self.grid.block[0] != 1:
            raise ValueError(f"{self.method} is of integers per_channel or per_group")
        if self.method != "lwc" and self.symmetric:
            raise ValueError(f"{self.method} has zero points: set symmetric to false")
        if self.method == "qoq" and (self.dtype != "int4" or self.scope != "per_group"):
            raise ValueError("qoq is of int4 per_group")

    @property
    def number_format(self) -> NumberFormat:
        return FORMATS[self.dtype]

    @property
    def grid(self) -> Grid:
        if self.number_format.group_size:
            return Grid(self.number_format, (1, self.number_format.group_size), self.symmetric)
        block = {
            "per_channel": (1, None),
            "per_group": (1, self.ext.group_size),
            "per_block": (self.ext.block_size, self.ext.block_size),
        }[self.scope]
        return Grid(self.number_format, block, self.symmetric)


class QConfig(_Strict):
    """The scheme of one linear; without `act` its input stays float."""

    weight: WeightSpec
    act: InputSpec | None = None

    def fitting(self, in_features: int) -> QConfig:
        """This scheme, or int8 per channel where groups do not divide `in_features`; inputs that
        no int8 weight goes with become int8 then too."""
        form = self.weight.number_format
        size = self.weight.ext.group_size if self.weight.scope == "per_group" else 1
        if in_features % size == 0 and (not form.group_size or in_features % form.unit == 0):
            return self
        act = self.act
        if act is not None and act.dtype != "int8":
            ext = Extension(rotation=act.ext.rotation)
            act = InputSpec(scope="per_token", dtype="int8", ext=ext)
        return QConfig(weight=WeightSpec(scope="per_channel", dtype="int8"), act=act)

    @model_validator(mode="after")
    def _has_a_product(self) -> QConfig:
        if self.act is None:
            return self
        if self.act.dtype not in INPUTS.get(self.weight.dtype, ()):
            known = " or ".join(("no inputs", *INPUTS.get(self.weight.dtype, ())))
            raise ValueError(f"act of {self.weight.dtype} weights is {known}, not {self.act.dtype}")
        if self.act.ext.max_error is not None and self.weight.dtype != "int8":
            raise ValueError("max_error leaves inputs float, which only an int8 weight goes with")
        if self.act.ext.rotation and (self.weight.dtype, self.act.dtype) == ("int4", "int8"):
            raise ValueError("rotation is of weights and inputs of one dtype")
        if not self.weight.symmetric and self.weight.method != "qoq":
            raise ValueError("a weight with zero points goes without act: set symmetric to true")
        return self

    @property
    def max_error(self) -> float | None:
        """The share of its outputs by which rounding its inputs may move a linear; above it they
        stay float."""
        return self.act.ext.max_error if self.act else None

    @property
    def fitted(self) -> bool:
        """Whether codes or scales are made for the inputs that the linear sees."""
        return self.weight.method in ("gptq", "lwc") or (
            self.act is not None and self.act.scope == "per_tensor"
        )

    @property
    def calibrated(self) -> bool:
        """Whether the inputs of the linear must be seen."""
        return self.fitted or self.max_error is not None

    @property
    def with_float_inputs(self) -> QConfig:
        return QConfig(weight=self.weight)

    def without_values(self, rows: int, columns: int, layout: str) -> QuantizedWeight:
        """The weight [rows, columns] that files of `layout` give back, on the meta device.

        QoQ's beside int8 inputs is the int8 that it expands to, and ModelSlim's weight-only
        integers have 8 bits.
        """
        rule, grid = input_rule(self.act, torch.zeros(1)), self.weight.grid
        if self.weight.method == "qoq" and rule != WEIGHT_ONLY:
            grid = Grid(INT8)
        form = grid.number_format
        if layout == "modelslim" and rule == WEIGHT_ONLY and form.is_integer:
            form = INT8
        codes = torch.empty(rows, columns, dtype=form.dtype, device="meta")
        block = grid.block_of(codes)
        blocks = ceil(rows / block[0]), ceil(columns / block[1])
        scale = torch.empty(blocks, dtype=torch.float32, device="meta")
        zero = None if grid.symmetric else scale.int()
        return QuantizedWeight(codes, scale, zero, block, form, rule)

    @property
    def name(self) -> str:
        """Such as W4A8."""
        inputs = 16 if self.act is None else self.act.number_format.bits
        form = self.weight.number_format
        kind = {"fp8_e4m3": "FP8 "}.get(form.name, f"{form.name.upper()} ")
        turned = " rotated" if self.act is not None and self.act.ext.rotation else ""
        return f"{'' if form.is_integer else kind}W{form.bits}A{inputs}{turned}"


def input_rule(spec: InputSpec | None, seen: Tensor | None) -> InputRule:
    """What the product does to its input; a static scale spans the range that was seen."""
    if spec is None:
        return WEIGHT_ONLY
    if spec.scope == "per_token" and spec.number_format.is_integer:
        return replace(PER_TOKEN, number_format=spec.number_format, rotated=spec.ext.rotation)
    if spec.scope != "per_tensor":
        own = spec.number_format.group_size
        group = spec.ext.group_size if spec.scope == "per_group" else own
        return InputRule(InputKind.PER_TOKEN, FORMATS[spec.dtype], group)
    if seen is None:
        raise ValueError("a static input scale needs inputs: raise --calibration-texts")
    form = FORMATS[spec.dtype]
    low, high = min(float(seen.min()), 0.0), max(float(seen.max()), 0.0)
    if spec.symmetric:
        scale, offset = max(-low, high) / form.maximum, 0.0
    else:
        scale = (high - low) / (form.maximum - form.minimum)
        offset = float(round(form.minimum - low / scale)) if scale else 0.0
    return InputRule(InputKind.STATIC, form, None, float(torch.tensor(scale or 1.0)), offset)


def layout_of(schemes: Sequence[QConfig]) -> str:
    """The layout whose files hold weights of all these: ModelSlim's, but for FP8 blocks DeepSeek's,
    and for weight-only integers compressed-tensors', which packs those of fewer than 8 bits."""
    weights = [scheme.weight for scheme in schemes]
    if all(weight.dtype == "fp8_e4m3" and weight.scope == "per_block" for weight in weights):
        return "fp8"
    # It has integer zero points only, which HQQ's are not, and no words of int3.
    packs = all(
        scheme.act is None
        and scheme.weight.dtype in ("int8", "int4", "int2")
        and scheme.weight.method != "hqq"
        for scheme in schemes
    )
    is_wide = all(weight.dtype == "int8" for weight in weights)
    return "compressed-tensors" if packs and not is_wide else "modelslim"
