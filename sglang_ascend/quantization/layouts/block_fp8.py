"""Block FP8, as DeepSeek-V3 and R1 are published: float8_e4m3fn `weight` [out, in] and float32
`weight_scale_inv`, which multiplies a block of weight_block_size; blocks at the edge are cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from sglang_ascend.checkpoint.reader import TensorEntry
from sglang_ascend.quantization.formats import FP8_E4M3
from sglang_ascend.quantization.layouts.base import (
    Layout,
    ModuleTensors,
    Scheme,
    SettingError,
    block_setting,
)
from sglang_ascend.quantization.weight import InputKind, InputRule, QuantizedWeight

FP8_DTYPE = "F8_E4M3"


class BlockFp8(Layout):
    name: ClassVar[str] = "fp8"

    def __init__(self, entries: Mapping[str, TensorEntry], settings: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self._block = block = block_setting(settings, "weight_block_size")
        activation = settings.get("activation_scheme", "dynamic")
        if activation != "dynamic":
            raise SettingError("activation_scheme", activation, "dynamic")
        self._input_rule = InputRule(InputKind.PER_TOKEN, FP8_E4M3, group_size=block[1])
        self._scheme = Scheme(
            f"FP8 {block[0]}x{block[1]}",
            FP8_E4M3,
            ("weight", "weight_scale_inv"),
            input_rule=self._input_rule,
            group_size=block[1],
        )

    def scheme(self, module: str) -> Scheme | None:
        weight = self.entries.get(f"{module}.weight")
        is_fp8 = weight is not None and weight.dtype == FP8_DTYPE
        if not is_fp8 and not self.holds(module, "weight_scale_inv"):
            return None
        return self._complete(module, self._scheme)

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        if self.scheme(module) is None:
            return super().read(module, tensors)
        held = ModuleTensors(module, tensors)
        codes = held.codes("weight", FP8_E4M3)
        num_blocks = (-(-codes.shape[i] // self._block[i]) for i in (0, 1))
        return QuantizedWeight(
            codes=codes,
            scale=held.scale("weight_scale_inv", *num_blocks),
            zero=None,
            block=self._block,
            number_format=FP8_E4M3,
            input_rule=self._input_rule,
        )
