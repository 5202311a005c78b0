"""A checkpoint folder, float or quantized: opened by its headers, read one module at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sglang_ascend.checkpoint.config import ModelConfig, read_config
from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.reader import TensorEntry, open_regular_file
from sglang_ascend.checkpoint.shards import read_tensors
from sglang_ascend.quantization.layouts import Layout, Scheme, find_layout
from sglang_ascend.quantization.weight import HEAD, QuantizedWeight

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder. Headers and settings are checked; no tensor has been read.

    Attributes:
        entries: every tensor by name, as the headers declare it.
        schemes: how each quantized module is quantized; every other weight is float.
    """

    folder: Path
    config: ModelConfig
    entries: Mapping[str, TensorEntry]
    layout: Layout
    schemes: Mapping[str, Scheme]

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Opens `folder`.

        Raises:
            CheckpointError: it is no complete checkpoint, or settings and headers contradict.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{shown(folder)} is no folder; pass the folder of a checkpoint")
        config = read_config(folder)
        entries = read_tensors(folder)
        layout = find_layout(folder, config.fields, entries)
        schemes = layout.schemes()
        if HEAD in schemes and config.flag("tie_word_embeddings"):
            raise CheckpointError(
                f"{shown(folder)} has a quantized lm_head, but config.json ties the head to the "
                "embedding; set tie_word_embeddings to false"
            )
        return cls(folder, config, entries, layout, schemes)

    def names_of(self, module: str) -> list[str]:
        """The tensors of a quantized module."""
        names = (f"{module}.{suffix}" for suffix in self.schemes[module].suffixes)
        return [name for name in names if name in self.entries]

    def float_names(self) -> list[str]:
        """Every tensor that is not part of a quantized module, in the order of the headers."""
        claimed = {name for module in self.schemes for name in self.names_of(module)}
        return [name for name in self.entries if name not in claimed]

    def tensor(self, name: str) -> Tensor:
        """Reads one tensor as it is stored.

        Raises:
            CheckpointError: its file shrank, or its dtype is one that torch cannot hold.
        """
        return read_tensor(self.entries[name])

    def weight(self, module: str) -> QuantizedWeight:
        """Reads one quantized module.

        Raises:
            CheckpointError: a tensor of it that contradicts its scheme.
        """
        prefix = len(module) + 1
        tensors = {name[prefix:]: self.tensor(name) for name in self.names_of(module)}
        return self.layout.read(module, tensors)


def read_tensor(entry: TensorEntry) -> Tensor:
    """The tensor that a header declares.

    Raises:
        CheckpointError: its file shrank, or its dtype is one that torch cannot hold.
    """
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointError(
            f"{shown(entry.file)} holds {shown(entry.name)} as {entry.dtype}, which is not read; "
            "export it as another dtype"
        )
    content = bytearray(entry.num_bytes)
    with open_regular_file(entry.file) as file:
        file.seek(entry.offset)
        if file.readinto(content) != entry.num_bytes:
            raise CheckpointError(
                f"{shown(entry.file)} became shorter while it was read; copy or download it again"
            )
    if not content:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).reshape(entry.shape)
