"""Int8 checkpoints of nano-deepseek as msModelSlim lays them out, and what they mean in float.

Written here from the definition, so that neither the package's solvers nor its writers are asked:
code = round(w / scale), scale = max|w| / 127 of each output, value = code * scale.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

QUANTIZED = re.compile(r"_proj(_with_mqa)?\.weight$")
# MLA multiplies kv_b_proj by itself, and eh_proj joins two inputs: published recipes leave both.
FLOAT = re.compile(r"kv_b_proj|eh_proj")
METADATA = {"version": "1.0.0", "metadata": {}, "group_size": 0, "optional": {}}


def write_int8(
    source: Path,
    folder: Path,
    scheme: str,
    *,
    target: bool = True,
    mtp: bool = True,
    mtp_scales_of_layer: int | None = None,
) -> Path:
    """``scheme`` (W8A8_DYNAMIC or W8A16) for the target's linears, the MTP layer's, or both.

    ``mtp_scales_of_layer`` is the mistake: the MTP layer is stored with the scales of that layer.
    """
    tensors, description = {}, {**METADATA, "model_quant_type": scheme}
    weights = load_file(source / "model.safetensors")
    mtp_layer = _mtp_layer(source)
    for name, weight in weights.items():
        is_mtp = name.startswith(mtp_layer)
        is_int8 = QUANTIZED.search(name) and not FLOAT.search(name) and (mtp if is_mtp else target)
        if not is_int8:
            tensors[name], description[name] = weight, "FLOAT"
            continue
        codes, scale = rounded(weight)
        if is_mtp and mtp_scales_of_layer is not None:
            scale = rounded(
                weights[name.replace(mtp_layer, f"model.layers.{mtp_scales_of_layer}.")]
            )[1]
        parts = {"": codes, "_scale": scale, "_offset": torch.zeros_like(scale)}
        tensors |= {name + suffix: part for suffix, part in parts.items()}
        description |= dict.fromkeys((name + suffix for suffix in parts), scheme)
    _copy_settings(source, folder)
    save_file(tensors, folder / "quant_model_weights-00001-of-00001.safetensors")
    (folder / "quant_model_description.json").write_text(json.dumps(description))
    return folder


def write_decoded(source: Path, folder: Path) -> Path:
    """The float32 checkpoint of the same values, for transformers."""
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        is_int8 = QUANTIZED.search(name) and not FLOAT.search(name)
        if is_int8:
            codes, scale = rounded(weight)
            weights[name] = codes.float() * scale
        else:
            weights[name] = weight.float()
    _copy_settings(source, folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 codes, float32 scales [out, 1])"""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return (weight.float() / scale).round().to(torch.int8), scale


def _mtp_layer(source: Path) -> str:
    config = json.loads((source / "config.json").read_text())
    return f"model.layers.{config['num_hidden_layers']}."


def _copy_settings(source: Path, folder: Path) -> None:
    folder.mkdir()
    for path in source.glob("*.json"):
        shutil.copy(path, folder)
