"""Writes FP8 in blocks as DeepSeek's own checkpoints hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.quantization.formats import FP8_E4M3
from sglang_ascend.quantization.layouts.block_fp8 import BlockFp8
from sglang_ascend.quantization.weight import InputKind, InputRule, QuantizedWeight
from sglang_ascend.quantization.writers.base import Writer


class BlockFp8Writer(Writer):
    """Every quantized module has the same block, which is also the group of its input."""

    name: ClassVar[str] = BlockFp8.name

    def __init__(self) -> None:
        self._block: tuple[int, int] | None = None

    def write(self, module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        self._block = self._block or weight.block
        rule = InputRule(InputKind.PER_TOKEN, FP8_E4M3, group_size=weight.block[1])
        if (
            weight.number_format is not FP8_E4M3
            or weight.block != self._block
            or weight.input_rule != rule
            or any(part is not None for part in (weight.zero, weight.bias, weight.group_index))
        ):
            raise CheckpointError(
                f"{shown(module)} is not FP8 in blocks as the other linears, which DeepSeek's "
                "files cannot hold; quantize it otherwise"
            )
        return {"weight": weight.codes, "weight_scale_inv": weight.scale}

    def config(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        if self._block is None:
            return dict(fields)
        settings = {
            "quant_method": BlockFp8.name,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self._block),
        }
        return {**fields, "quantization_config": settings}
