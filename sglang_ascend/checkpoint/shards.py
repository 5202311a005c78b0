"""Which safetensors files SGLang would load from a folder, and whether the index agrees with them.

Follows `DefaultModelLoader._prepare_weights` of SGLang 0.5.23 for the load format `auto`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_ascend.checkpoint.errors import CheckpointError, shown, wrong_shape_of_json
from sglang_ascend.checkpoint.reader import TensorEntry, read_header, read_json_object

INDEX_NAME = "model.safetensors.index.json"
MODELSLIM_INDEX = "quant_model_weight*.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint in `folder`, by name, from the headers of its shards.

    A shard is named by a plain file name: SGLang never loads one from a subfolder, and a name with
    a path in it could point outside. The file itself may be a symbolic link to anywhere, as in the
    Hugging Face cache, where a snapshot links to its blobs: who made the folder made the link.

    Raises:
        CheckpointError: no safetensors file (pickles are never read), a shard that is missing,
            truncated or corrupt, an index that contradicts its shards, or a tensor held twice.
    """
    index_path = folder / INDEX_NAME
    if index_path.exists():
        return _read_indexed(folder, index_path)
    files = sorted(folder.glob("*.safetensors"))
    if [file.name for file in files] == ["consolidated.safetensors", "model.safetensors"]:
        files = files[1:]  # Mistral ships its weights twice; SGLang takes this one
    if not files:
        raise _no_safetensors(folder)
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{shown(file)} and {shown(tensors[name].file)} both hold {shown(name)}; "
                    f"move one of them away or name the right one in {INDEX_NAME}"
                )
            tensors[name] = tensor
    for index_path in sorted(folder.glob(MODELSLIM_INDEX)):
        _check_promises(index_path, tensors)
    return tensors


def _check_promises(index_path: Path, tensors: Mapping[str, TensorEntry]) -> None:
    """An index that SGLang does not read must still name what the shards hold."""
    promised = _names_by_shard(index_path, read_json_object(index_path).get("weight_map"))
    for shard_name, names in sorted(promised.items()):
        for name in names:
            if name not in tensors or tensors[name].file.name != shard_name:
                raise CheckpointError(
                    f"{shown(index_path)} promises {shown(name)} in {shown(shard_name)}, which "
                    "does not hold it; copy or download both files again"
                )


def _read_indexed(folder: Path, index_path: Path) -> dict[str, TensorEntry]:
    """The tensors of the shards that the index names; each must hold what the index promises."""
    promised = _names_by_shard(index_path, read_json_object(index_path).get("weight_map"))
    tensors: dict[str, TensorEntry] = {}
    for shard_name, names in sorted(promised.items()):
        shard = folder / shard_name
        if not shard.exists():
            raise CheckpointError(
                f"{shown(shard)} is missing although {INDEX_NAME} names it; "
                "copy or download it again"
            )
        held = read_header(shard)
        absent = [name for name in names if name not in held]
        if absent:
            raise CheckpointError(
                f"{shown(shard)} lacks {shown(absent[0])} ({len(absent)} in all) that "
                f"{INDEX_NAME} promises; copy or download both files again"
            )
        for name in held.keys() & tensors.keys():
            raise CheckpointError(
                f"{shown(shard)} and {shown(tensors[name].file)} both hold {shown(name)}; "
                "copy or download both files again"
            )
        tensors.update(held)
    return tensors


def _names_by_shard(index_path: Path, weight_map: Any) -> dict[str, list[str]]:
    if not isinstance(weight_map, dict) or not weight_map:
        raise wrong_shape_of_json(index_path, "a weight_map of tensor names to shards")
    promised: dict[str, list[str]] = defaultdict(list)
    for name, shard_name in weight_map.items():
        if not _is_plain_shard_name(shard_name):
            raise CheckpointError(
                f"{shown(index_path)} places {shown(name)} in {shown(shard_name)}, which is no "
                "plain .safetensors file name in the same folder; correct the index"
            )
        promised[shard_name].append(name)
    return promised


def _is_plain_shard_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and name.isprintable()
        and "/" not in name
        and "\\" not in name
    )


def _no_safetensors(folder: Path) -> CheckpointError:
    pickles = sorted(file.name for pattern in PICKLE_PATTERNS for file in folder.glob(pattern))
    if pickles:
        return CheckpointError(
            f"{shown(folder)} holds its weights only as pickles (first {shown(pickles[0])}), "
            "which can run code when they are read; convert them to safetensors"
        )
    return CheckpointError(
        f"{shown(folder)} holds no .safetensors file; pass the folder of a complete checkpoint"
    )
