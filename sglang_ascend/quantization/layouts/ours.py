"""Our own layout: ModelSlim's files, and one side file with the recipe and every file's SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from sglang_ascend.checkpoint.errors import CheckpointError, shown, wrong_shape_of_json
from sglang_ascend.checkpoint.reader import TensorEntry, open_regular_file, read_json_object
from sglang_ascend.quantization.layouts.modelslim import DESCRIPTION, ModelSlim

SIDE_FILE = "sglang_ascend_quantization.json"
VERSION = 1


class Ours(ModelSlim):
    """`recipe` is what the weights were quantized by; `hashes` the SHA-256 of each file by name."""

    name: ClassVar[str] = "sglang-ascend"

    def __init__(
        self, entries: Mapping[str, TensorEntry], description: Mapping[str, Any], folder: Path
    ) -> None:
        super().__init__(entries, description, folder / DESCRIPTION)
        self.recipe, self.hashes = read_side_file(folder / SIDE_FILE)


def read_side_file(path: Path) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """(recipe, SHA-256 by file name).

    Raises:
        CheckpointError: another version, or names that are no plain file names.
    """
    content = read_json_object(path)
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{shown(path)} has version {shown(content.get('version'))} and {VERSION} is known; "
            "install the release of sglang-ascend that wrote it"
        )
    recipe, hashes = content.get("recipe"), content.get("sha256")
    if not isinstance(recipe, dict):
        raise wrong_shape_of_json(path, "a recipe")
    if not isinstance(hashes, dict) or not all(isinstance(h, str) for h in hashes.values()):
        raise wrong_shape_of_json(path, "the SHA-256 of each file")
    for name in hashes:
        if name in ("", "..") or Path(name).name != name or "\\" in name or "\0" in name:
            raise CheckpointError(
                f"{shown(path)} names the file {shown(name)}, which is no plain file name in the "
                "same folder; quantize the model again"
            )
    return recipe, hashes


def write_side_file(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Hashes every file of `folder` and writes the side file; called when all else is written."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    hashes = {name: sha256(folder / name) for name in names if name != SIDE_FILE}
    content = {"version": VERSION, "recipe": recipe, "sha256": hashes}
    (folder / SIDE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    """Of the file at `path`, in hexadecimal.

    Raises:
        CheckpointError: it cannot be read.
    """
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
