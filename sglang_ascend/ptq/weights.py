"""A checkpoint's weights as float32 tensors and as products of quantized linears."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_ascend.ptq.served import Emulated
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.product import Product, prepare
from sglang_ascend.quantization.weight import QuantizedWeight
from sglang_ascend.training.targets.quantized import Opened

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Weights(Opened):
    """An opened checkpoint, float or quantized.

    Args:
        source: its folder, or what was opened.
        solved: linears, by their modules, that are quantized in memory only.
    """

    def __init__(
        self, source: Path | Checkpoint, solved: Mapping[str, QuantizedWeight | Emulated] = NOTHING
    ) -> None:
        super().__init__(Checkpoint.open(source) if isinstance(source, Path) else source)
        self._solved = solved

    def quantized(self, module: str) -> QuantizedWeight | Emulated | None:
        """The weight of linear `module`, None where it is float."""
        if module in self._solved:
            return self._solved[module]
        return self.checkpoint.weight(module) if module in self.checkpoint.schemes else None

    def product(self, module: str) -> Product | None:
        weight = self.quantized(module)
        if weight is None:
            return None
        return weight.product if isinstance(weight, Emulated) else prepare(weight)

    @property
    def num_bytes(self) -> int:
        entries = self.checkpoint.entries.items()
        replaced = {f"{module}.weight" for module in self._solved}
        kept = sum(entry.num_bytes for name, entry in entries if name not in replaced)
        return kept + sum(weight.num_bytes for weight in self._solved.values())
