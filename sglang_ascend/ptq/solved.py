"""A float checkpoint in which some linears have been solved, as the checkpoint to be written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from sglang_ascend.ptq.progress import read_weight
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.layouts import Layout, Scheme
from sglang_ascend.quantization.weight import HEAD, QuantizedWeight


class _Solved(Layout):
    """Reads the finished linears from where they lie."""

    def __init__(self, checkpoint: Checkpoint, modules: Mapping[str, Path]) -> None:
        super().__init__(checkpoint.entries)
        self._modules = modules

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        return read_weight(self._modules[module], module)


def quantized_view(checkpoint: Checkpoint, modules: Mapping[str, Path]) -> Checkpoint:
    """`checkpoint` with the finished linears in place of its float ones."""
    is_tied = checkpoint.config.flag("tie_word_embeddings")
    if HEAD in modules and (is_tied or f"{HEAD}.weight" not in checkpoint.entries):
        checkpoint = _untied(checkpoint)
    schemes = {
        module: Scheme("solved", read_weight(modules[module], module).number_format, ("weight",))
        for module in modules
    }
    return replace(checkpoint, layout=_Solved(checkpoint, modules), schemes=schemes)


def _untied(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with the embedding a second time, as the head."""
    name = f"{HEAD}.weight"
    entry = replace(checkpoint.entries["model.embed_tokens.weight"], name=name)
    config = replace(
        checkpoint.config, fields={**checkpoint.config.fields, "tie_word_embeddings": False}
    )
    return replace(checkpoint, config=config, entries={**checkpoint.entries, name: entry})
