"""Every kind of quantized checkpoint; `find_layout` tells which one a folder is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_ascend.checkpoint.config import QUANTIZATION_FIELDS
from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.reader import TensorEntry, read_json_object
from sglang_ascend.quantization.layouts.awq import Awq
from sglang_ascend.quantization.layouts.base import Layout, Scheme
from sglang_ascend.quantization.layouts.block_fp8 import BlockFp8
from sglang_ascend.quantization.layouts.compressed_tensors import CompressedTensors
from sglang_ascend.quantization.layouts.gptq import Gptq
from sglang_ascend.quantization.layouts.modelslim import DESCRIPTION, ModelSlim
from sglang_ascend.quantization.layouts.ours import SIDE_FILE, Ours

__all__ = ["Layout", "Scheme", "find_layout", "says_quantized"]

METHODS = {layout.name: layout for layout in (CompressedTensors, Gptq, Awq, BlockFp8)}


def says_quantized(folder: Path) -> bool:
    """Whether `folder` has what `find_layout` tells a quantized checkpoint by.

    Raises:
        CheckpointError: its config.json is no JSON object.
    """
    if (folder / DESCRIPTION).exists():
        return True
    config = folder / "config.json"
    return config.exists() and _settings(read_json_object(config)) is not None


def _settings(config: Mapping[str, Any]) -> Any:
    """What config.json says of quantization, or None."""
    return next((config[name] for name in QUANTIZATION_FIELDS if config.get(name)), None)


def find_layout(
    folder: Path, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]
) -> Layout:
    """The layout of the checkpoint in `folder`, from its config.json and its tensors' headers.

    Raises:
        CheckpointError: the checkpoint is quantized by a method that is not known, or its settings
            cannot be read.
    """
    if (folder / DESCRIPTION).exists():
        description = read_json_object(folder / DESCRIPTION)
        if (folder / SIDE_FILE).exists():
            return Ours(entries, description, folder)
        return ModelSlim(entries, description, folder / DESCRIPTION)
    settings = _settings(config)
    if settings is None:
        return Layout(entries)
    if not isinstance(settings, dict):
        raise CheckpointError(
            f"{shown(folder / 'config.json')} has a quantization_config that is no object; "
            "restore the config.json it was written with"
        )
    default = CompressedTensors.name if "config_groups" in settings else None
    method = settings.get("quant_method", default)
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"{shown(folder / 'config.json')} is quantized by {shown(method)} and known are "
            f"ModelSlim, {', '.join(METHODS)}; convert it to one of these"
        )
    return METHODS[method](entries, settings)
