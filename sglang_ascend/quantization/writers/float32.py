"""Writes every tensor as float32: what any tool reads, and the oracle of what is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from sglang_ascend.quantization.weight import QuantizedWeight
from sglang_ascend.quantization.writers.base import Writer


class Float32Writer(Writer):
    name: ClassVar[str] = "float32"

    def write_float(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.to(torch.float32) if tensor.is_floating_point() else tensor

    def write(self, module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        bias = {} if weight.bias is None else {"bias": weight.bias}
        return {"weight": weight.dequantize(), **bias}

    def config(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        names = {"torch_dtype", "dtype"} & fields.keys() or {"dtype"}
        return {**fields, **dict.fromkeys(names, "float32")}
