"""A checkpoint's weights as float32 tensors and as quantized linears."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.ptq.served import Emulated
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.weight import QuantizedWeight

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Weights:
    """An opened checkpoint, float or quantized.

    Args:
        source: its folder, or what was opened.
        solved: linears, by their modules, that are quantized in memory only.
    """

    def __init__(
        self, source: Path | Checkpoint, solved: Mapping[str, QuantizedWeight | Emulated] = NOTHING
    ) -> None:
        self.checkpoint = Checkpoint.open(source) if isinstance(source, Path) else source
        self._solved = solved

    def quantized(self, module: str) -> QuantizedWeight | Emulated | None:
        """The weight of linear `module`, None where it is float."""
        if module in self._solved:
            return self._solved[module]
        return self.checkpoint.weight(module) if module in self.checkpoint.schemes else None

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named tensors in float32.

        Raises:
            CheckpointError: one is missing.
        """
        return {name: self._tensor(name).float() for name in names}

    def _tensor(self, name: str) -> Tensor:
        if name not in self.checkpoint.entries:
            raise CheckpointError(
                f"{shown(self.checkpoint.folder)} lacks {shown(name)}; pass a complete checkpoint "
                "with one tensor for each expert and projection"
            )
        return self.checkpoint.tensor(name)

    @property
    def num_bytes(self) -> int:
        entries = self.checkpoint.entries.items()
        replaced = {f"{module}.weight" for module in self._solved}
        kept = sum(entry.num_bytes for name, entry in entries if name not in replaced)
        return kept + sum(weight.num_bytes for weight in self._solved.values())
