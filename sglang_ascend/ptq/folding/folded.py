"""A float checkpoint whose tensors are transformed when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_ascend.quantization.checkpoint import Checkpoint


@dataclass(frozen=True)
class FoldedCheckpoint(Checkpoint):
    """Rows and columns of its tensors are multiplied, in float64 and rounded once.

    Attributes:
        rows, columns: by tensor, what its first or its last dimension is multiplied by.
    """

    rows: Mapping[str, Tensor] = field(default_factory=dict)
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, source: Checkpoint, rows: Mapping[str, Tensor], columns: Mapping[str, Tensor]
    ) -> FoldedCheckpoint:
        parts = source.folder, source.config, source.entries, source.layout, source.schemes
        return cls(*parts, rows, columns)

    def tensor(self, name: str) -> Tensor:
        """In the dtype of the source where that holds it exactly, else float32."""
        stored = super().tensor(name)
        if name not in self.rows and name not in self.columns:
            return stored
        values = stored.double()
        if name in self.columns:
            values = values * self.columns[name]
        if name in self.rows:
            values = values * self.rows[name].reshape(-1, *[1] * (values.dim() - 1))
        values = values.float()
        narrow = values.to(stored.dtype)
        return narrow if torch.equal(narrow.float(), values) else values
