"""A float checkpoint in which some linears have been solved, as the checkpoint to be written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path

import torch
from torch import Tensor, nn

from sglang_ascend.checkpoint.errors import CheckpointError
from sglang_ascend.ptq.calibration import quantize_linear
from sglang_ascend.ptq.progress import read_weight
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.layouts import Layout, Scheme
from sglang_ascend.quantization.qconfig import QConfig
from sglang_ascend.quantization.weight import HEAD, QuantizedWeight
from sglang_ascend.quantization.writers import make_writer


@dataclass(frozen=True)
class Summary:
    """What was done: linears by scheme, those whose groups do not divide, those whose inputs stayed
    float, those left float, what of the recipe did nothing, and whether there is an MTP layer."""

    schemes: Mapping[str, int]
    fallbacks: tuple[str, ...]
    float_inputs: tuple[str, ...]
    left_float: tuple[str, ...]
    idle: tuple[str, ...]
    has_mtp: bool
    already_done: bool = False


def refuse_unwritable(schemes: Iterable[QConfig], layout: str, source: Checkpoint) -> None:
    """Before hours of work: files of `layout` have to hold weights of these schemes.

    Raises:
        CheckpointError: it has no such weight as one of them has.
    """
    writer, random = make_writer(layout, source.layout), torch.Generator()
    for scheme in dict.fromkeys(schemes):
        spec = scheme.weight
        group = {"per_group": spec.ext.group_size, "per_block": spec.ext.block_size}
        sizes = group.get(spec.scope, 1), spec.number_format.group_size or 1
        size = 2 * lcm(*sizes, spec.number_format.unit)
        linear = nn.Linear(size, size, bias=False, device="meta")
        linear.weight = nn.Parameter(torch.randn(size, size, generator=random), False)
        is_static = scheme.act is not None and scheme.act.scope == "per_tensor"
        seen = torch.randn(8, size, generator=random) if is_static else None
        solved = quantize_linear(linear, scheme, seen)
        try:
            writer.write(f"a linear in {scheme.name}", solved)
        except CheckpointError as error:
            reason = str(error).partition(";")[0]
            raise CheckpointError(f"{reason}; give it another scheme in the recipe") from None


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
