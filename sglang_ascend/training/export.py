"""A trained layer joined with its target into a folder that SGLang serves."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open

from sglang_ascend.checkpoint import validate_checkpoint
from sglang_ascend.checkpoint.folder import let_others_read
from sglang_ascend.checkpoint.shards import INDEX_NAME, read_tensors
from sglang_ascend.files import new_folder, replaced, write_json
from sglang_ascend.quantization.convert import convert
from sglang_ascend.quantization.layouts.modelslim import ModelSlim
from sglang_ascend.quantization.layouts.ours import SIDE_FILE, read_side_file, write_side_file
from sglang_ascend.quantization.writers import make_writer
from sglang_ascend.quantization.writers.saving import save_tensors
from sglang_ascend.speculative.vocabulary.file import FILE_NAME as DRAFT_VOCABULARY
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.layer import MTPLayer
from sglang_ascend.training.targets.llama import zero_tensors

Tensor = torch.Tensor
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_OF_OLD_LAYER = (DRAFT_VOCABULARY, "provenance.json")


def export(target: Target, layer: MTPLayer, out: Path) -> None:
    """Writes the target with `layer` to `out`, and checks it as a server would.

    The files are the target's. The layer goes to the last one, and leaves those that held another.
    A Llama becomes the Qwen2 that computes the same. Behind a quantized target the layer is float.

    Raises:
        FileExistsError: `out` holds files already.
        CheckpointError: the result could not be served.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: name a new folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out, "OUT") as folder:
        write = _write_quantized if target.config.quantized else _write
        write(target, layer, folder)
        validate_checkpoint(folder)


def _write(target: Target, layer: MTPLayer, out: Path) -> None:
    new = layer.to_checkpoint()
    if target.is_llama:
        new |= zero_tensors(target.config, torch.bfloat16)
    shards = sorted({entry.file for entry in target.tensors.values()})
    weight_map = {}
    for shard in shards:
        tensors = _without_layer(shard, target.mtp_prefix) | (new if shard == shards[-1] else {})
        save_tensors(tensors, out / shard.name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.name)
    if len(shards) > 1:
        write_json(out / INDEX_NAME, {"metadata": {}, "weight_map": weight_map})
    for path in target.folder.iterdir():
        if path.is_file() and not path.name.endswith((*_WEIGHTS, INDEX_NAME, *_OF_OLD_LAYER)):
            shutil.copyfile(path, out / path.name)
    write_json(out / "config.json", target.served_config)
    let_others_read(out)


def export_layer(layer: MTPLayer, path: Path) -> None:
    """Writes the layer's tensors alone to `path`, replaced whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as part:
        save_tensors(layer.to_checkpoint(), part, {"format": "pt"})


def _write_quantized(target: Target, layer: MTPLayer, out: Path) -> None:
    """In the layout of the target; what it says of each file's hash is said anew."""
    source = target.quantized
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
        save_tensors(layer.to_checkpoint(), Path(beside) / "model.safetensors")
        kept = {n: e for n, e in source.entries.items() if not n.startswith(target.mtp_prefix)}
        schemes = {n: s for n, s in source.schemes.items() if not n.startswith(target.mtp_prefix)}
        joined = replace(
            source,
            config=replace(source.config, fields=target.served_config),
            entries=kept | read_tensors(Path(beside)),
            schemes=schemes,
        )
        out.rmdir()
        name = "modelslim" if isinstance(source.layout, ModelSlim) else source.layout.name
        convert(joined, out, make_writer(name, source.layout))
    for name in _OF_OLD_LAYER:
        (out / name).unlink(missing_ok=True)
    if (source.folder / SIDE_FILE).exists():
        recipe, _ = read_side_file(source.folder / SIDE_FILE)
        write_side_file(out, {**recipe, "mtp_layer": "trained behind it"})


def _without_layer(shard: Path, prefix: str) -> dict[str, Tensor]:
    with safe_open(shard, "pt") as file:
        names = [name for name in file.keys() if not name.startswith(prefix)]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in names}
