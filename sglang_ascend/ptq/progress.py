"""The folder beside an unfinished output: finished layers, and what they were made by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.files import alone_in, part_of, replaced
from sglang_ascend.ptq.text import Text, opened, read_texts, write_texts
from sglang_ascend.quantization.formats import FORMATS
from sglang_ascend.quantization.weight import InputKind, InputRule, QuantizedWeight
from sglang_ascend.quantization.writers.saving import save_tensors

TASK, TEXT, LOCK = "task.json", "calibration.safetensors", "lock"
WORDS = {
    "source": "model",
    "model": "model",
    "calibration": "--seed, --calibration-texts or --calibrate",
    "scales_sha256": "--smoothing",
}
TENSORS = ("codes", "scale", "zero", "bias", "group_index")


class Partial:
    """Finished layers of one task; a file in it is whole, for it was renamed into place.

    Args:
        folder: that of `claimed`.
        task: what decides the result: source, recipe, seed.

    Raises:
        CheckpointError: the folder holds the layers of another task.
    """

    def __init__(self, folder: Path, task: Mapping[str, Any]) -> None:
        self.folder = folder
        content = json.dumps(task, indent=2, sort_keys=True)
        path = folder / TASK
        if not path.exists():
            with replaced(path) as part:
                part.write_text(content, encoding="utf-8")
        elif others := differing(_read(path), json.loads(content)):
            raise CheckpointError(
                f"{shown(folder)} holds unfinished layers of another {others}; "
                "name another --out, or delete that folder to begin anew"
            )

    def has(self, number: int) -> bool:
        return self._layer(number).exists()

    def write(self, number: int, weights: Mapping[str, QuantizedWeight]) -> None:
        """Keeps the quantized linears of layer `number`."""
        tensors, described = {}, {}
        for module, weight in weights.items():
            held = {name: getattr(weight, name) for name in TENSORS}
            tensors |= {f"{module}|{n}": t.contiguous() for n, t in held.items() if t is not None}
            described[module] = {
                "block": weight.block,
                "format": weight.number_format.name,
                "rule": asdict(weight.input_rule)
                | {"number_format": weight.input_rule.number_format.name},
            }
        metadata = {"modules": json.dumps(described)}
        with replaced(self._layer(number)) as part:
            save_tensors(tensors, part, metadata)

    def modules(self) -> dict[str, Path]:
        """Where each finished linear lies."""
        found = {}
        for path in sorted(self.folder.glob("layer-*.safetensors")):
            with opened(path) as file:
                found |= dict.fromkeys(json.loads(file.metadata()["modules"]), path)
        return found

    def text(self) -> list[Text] | None:
        """The calibration text, None before `keep_text`."""
        path = self.folder / TEXT
        return read_texts(path) if path.exists() else None

    def keep_text(self, texts: list[Text]) -> None:
        with replaced(self.folder / TEXT) as part:
            write_texts(part, texts)

    def _layer(self, number: int) -> Path:
        return self.folder / f"layer-{number:05d}.safetensors"


def differing(held: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """What of two tasks is another, in words. A recipe may have another name: `./r.yaml` is
    `r.yaml`."""
    names = [n for n in sorted({*held, *asked} - {"name"}) if held.get(n) != asked.get(n)]
    return ", ".join(dict.fromkeys(WORDS.get(name, "recipe") for name in names))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise CheckpointError(
            f"{shown(path)} is damaged; delete that folder to begin anew"
        ) from None


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keeps a second command out of `folder`, which is made if missing.

    Raises:
        CheckpointError: it holds something else than an unfinished quantization.
        ValueError: another process is at work there.
    """
    ours = {folder / LOCK, part_of(folder / TASK)}
    if not (folder / TASK).exists() and folder.exists() and set(folder.iterdir()) - ours:
        raise CheckpointError(
            f"{shown(folder)} is not an unfinished quantization; name another --out or "
            "move that folder away"
        )
    with alone_in(folder, LOCK):
        yield


def read_weight(path: Path, module: str) -> QuantizedWeight:
    """One linear of a finished layer."""
    with opened(path) as file:
        described = json.loads(file.metadata()["modules"])[module]
        held: dict[str, Tensor | None] = {
            name: file.get_tensor(f"{module}|{name}") if f"{module}|{name}" in file.keys() else None  # noqa: SIM118
            for name in TENSORS
        }
    rule = described["rule"]
    kind, form = InputKind(rule["kind"]), FORMATS[rule["number_format"]]
    codes, scale = held["codes"], held["scale"]
    assert codes is not None and scale is not None
    return QuantizedWeight(
        codes=codes,
        scale=scale,
        zero=held["zero"],
        block=tuple(described["block"]),
        number_format=FORMATS[described["format"]],
        input_rule=InputRule(**rule | {"kind": kind, "number_format": form}),
        bias=held["bias"],
        group_index=held["group_index"],
    )
