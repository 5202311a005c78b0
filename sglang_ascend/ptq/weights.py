"""A checkpoint's weights as float32 tensors and as quantized linears."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.weight import QuantizedWeight


class Weights:
    """An opened checkpoint, float or quantized."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = Checkpoint.open(folder)

    def quantized(self, module: str) -> QuantizedWeight | None:
        """The weight of linear `module`, None where the checkpoint holds it in float."""
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
        return sum(entry.num_bytes for entry in self.checkpoint.entries.values())
