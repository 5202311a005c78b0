"""What FlexSmoothQuant found, saved beside the weights so that it can be applied again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown, wrong_shape_of_json
from sglang_ascend.checkpoint.reader import read_json_object
from sglang_ascend.files import replaced, write_json
from sglang_ascend.quantization.layouts.ours import sha256
from sglang_ascend.quantization.transforms.smoothing import Smoothing
from sglang_ascend.quantization.writers.saving import save_tensors

# As msmodelslim's: SGLang reads every safetensors file beside the weights.
FOLDER = "optional"
SCALES, FOUND = "flex_smooth.safetensors", "flex_smooth.json"
VERSION = 1


@dataclass(frozen=True)
class Admitted:
    """Which scales of a pair may be folded.

    Attributes:
        width: how many they are.
        floats: the matrices that they scale and a recipe leaves float. Powers of two alone leave
            these exact.
    """

    width: int
    floats: tuple[str, ...]


def model_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of config.json and every file of weights in `folder`."""
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    return {path.name: sha256(path) for path in [folder / "config.json", *files]}


def write(
    folder: Path, found: Mapping[str, Smoothing], model: Mapping[str, str], process: Any
) -> None:
    """Both files, the second when the first is whole.

    Args:
        model: hashes of what was smoothed.
        process: the recipe's words.
    """
    folder.mkdir(exist_ok=True)
    with replaced(folder / SCALES) as part:
        save_tensors({name: one.scale.contiguous() for name, one in found.items()}, part)
    described = {
        name: {"alpha": one.alpha, "beta": one.beta, "loss": one.loss}
        for name, one in found.items()
    }
    content = {
        "version": VERSION,
        "model": model,
        "process": process,
        "scales_sha256": sha256(folder / SCALES),
        "pairs": described,
    }
    write_json(folder / FOUND, content)


def read(
    folder: Path, admitted: Mapping[str, Admitted], model: Mapping[str, str], process: Any
) -> dict[str, Smoothing]:
    """What `write` wrote into `folder`.

    Args:
        admitted: the scales that may be there, by pair.
        model, process: as they must be.

    Raises:
        CheckpointError: files that are missing, damaged, of another model or of another recipe, or
            scales that would round a matrix which stays float.
    """
    content = read_json_object(folder / FOUND)
    described = content.get("pairs")
    if content.get("version") != VERSION or not isinstance(described, dict):
        raise wrong_shape_of_json(folder / FOUND, f"version {VERSION} and its pairs")
    for field, wanted in (("model", model), ("process", process)):
        if content.get(field) != wanted:
            raise CheckpointError(
                f"{shown(folder / FOUND)} is of another {field}; smooth this one without it"
            )
    if sha256(folder / SCALES) != content.get("scales_sha256"):
        raise _damaged(folder, "is not the file that was written")
    try:
        scales = load_file(folder / SCALES)
    except SafetensorError as error:
        raise _damaged(folder, f"cannot be read ({error})") from None
    if scales.keys() != described.keys():
        raise _damaged(folder, f"and {FOUND} name other pairs")
    return {
        name: _read_one(folder, name, described[name], scales[name], admitted) for name in scales
    }


def _read_one(
    folder: Path, name: str, described: Any, scale: Tensor, admitted: Mapping[str, Admitted]
) -> Smoothing:
    pair = admitted.get(name)
    if pair is None:
        raise _damaged(folder, f"has {shown(name)}, which is no pair that this recipe smooths")
    if scale.dtype != torch.float32 or scale.shape != (pair.width,):
        raise _damaged(folder, f"has {shown(name)} of {list(scale.shape)}, not {[pair.width]}")
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise _damaged(folder, f"has {shown(name)} that is not finite and above 0")
    if pair.floats and bool((torch.frexp(scale).mantissa != 0.5).any()):
        raise CheckpointError(
            f"{shown(folder / SCALES)} has {shown(name)} in other than powers of two, which would "
            f"round {shown(pair.floats[0])}, which this recipe leaves float; leave out --smoothing "
            "to search its scales, or quantize that linear as the recipe of those scales does"
        )
    try:
        return Smoothing(scale, *(float(described[word]) for word in ("alpha", "beta", "loss")))
    except (TypeError, KeyError, ValueError):
        raise wrong_shape_of_json(folder / FOUND, f"alpha, beta and loss of {name}") from None


def _damaged(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{shown(folder / SCALES)} {problem}; smooth the model again")
