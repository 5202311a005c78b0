"""Writes a checkpoint in another layout, shard by shard; the folder appears when it is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sglang_ascend.checkpoint.config import QUANTIZATION_FIELDS, QUANTIZATION_FILES
from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.folder import let_others_read
from sglang_ascend.files import new_folder
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.layouts.ours import SIDE_FILE
from sglang_ascend.quantization.writers import Writer
from sglang_ascend.quantization.writers.saving import save_tensors

COPIED_SUFFIXES = frozenset({".json", ".txt", ".jinja", ".model", ".tiktoken", ".md"})
NOT_COPIED = frozenset({"config.json", SIDE_FILE, *QUANTIZATION_FILES})
INDEX_SUFFIX = ".safetensors.index.json"


def convert(
    source: Checkpoint,
    out: Path,
    writer: Writer,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Writes `source` into the new folder `out`; at most one shard and one module are in memory.

    Args:
        progress: called with the number of bytes of the source that were dealt with since.

    Raises:
        CheckpointError: `out` exists, the source is refused, or the layout cannot hold a weight.
        ValueError: another process is making `out`.
    """
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{shown(out)} exists; name a new folder or move it away")
    with new_folder(out, "OUT") as folder:
        _write(source, folder, writer, progress)
        let_others_read(folder)


def _write(
    source: Checkpoint, folder: Path, writer: Writer, progress: Callable[[int], object]
) -> None:
    shards = sorted({entry.file for entry in source.entries.values()})
    placed: dict[str, str] = {}
    total_size = 0
    for number, shard in enumerate(shards, 1):
        file_name = writer.shard_name.format(number, len(shards))
        if len(shards) == 1 and writer.single_name is not None:
            file_name = writer.single_name
        tensors = {name: tensor.contiguous() for name, tensor in _shard(source, shard, writer)}
        save_tensors(tensors, folder / file_name, writer.metadata)
        placed |= dict.fromkeys(tensors, file_name)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
        progress(sum(e.num_bytes for e in source.entries.values() if e.file == shard))
    if len(shards) > 1 or writer.single_name is None:
        index = {
            "metadata": {"total_size": total_size},
            "weight_map": {name: placed[name] for name in writer.order(placed)},
        }
        write_json(folder / writer.index_name, index, indent=2)
    for name, content in writer.files().items():
        write_json(folder / name, content, indent=4)
    _copy_companions(source, folder)
    fields = dict(source.config.fields)
    for name in QUANTIZATION_FIELDS:
        fields.pop(name, None)
    write_json(folder / "config.json", writer.config(fields), indent=2)


def _shard(source: Checkpoint, shard: Path, writer: Writer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one new shard: those that replace a tensor of `shard`, and new ones of modules
    whose first tensor lies there."""
    for name in source.float_names():
        entry = source.entries[name]
        if entry.file == shard and not (
            source.layout.is_own(name) and not writer.keeps_own(source.layout)
        ):
            yield name, writer.write_float(name, source.tensor(name))
    for module in source.schemes:
        names = source.names_of(module)
        files = [source.entries[name].file for name in names]
        if shard not in files:
            continue
        for suffix, tensor in writer.write(module, source.weight(module)).items():
            name = f"{module}.{suffix}"
            entry = source.entries.get(name)
            if suffix == "bias" and entry is not None:
                continue  # the same bias lies beside the integers that it was folded into
            if (files[0] if entry is None else entry.file) == shard:
                yield name, tensor


def _copy_companions(source: Checkpoint, folder: Path) -> None:
    """Tokenizer, templates and the like; no weights, and no code."""
    for path in sorted(source.folder.iterdir()):
        is_wanted = path.suffix in COPIED_SUFFIXES and path.name not in NOT_COPIED
        if is_wanted and not path.name.endswith(INDEX_SUFFIX) and path.is_file():
            shutil.copyfile(path, folder / path.name)


def write_json(path: Path, content: Mapping[str, Any], indent: int) -> None:
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False), encoding="utf-8")
