"""What a trainer leaves in its folder, for those that read it: one file, with its progress."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

CHECKPOINT = "checkpoint.safetensors"


@contextmanager
def opened_checkpoint(out: Path) -> Iterator[Any]:
    """A trainer's. Raises FileNotFoundError: `out` holds none; ValueError: it was damaged since."""
    path = out / CHECKPOINT
    if not path.exists():
        raise FileNotFoundError(f"{out} holds no {CHECKPOINT}: run `train` first.")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it to begin anew.") from None


def read_average(out: Path) -> dict[str, Tensor]:
    """The moving average of the weights in a trainer's folder: what is evaluated and exported."""
    with opened_checkpoint(out) as file:
        names = [name for name in file.keys() if name.startswith("average.")]  # noqa: SIM118
        return below("average.", {name: file.get_tensor(name) for name in names})


def trained_for(out: Path) -> str | None:
    """The fingerprint of the target whose shards a layer was trained on; None: they had none."""
    with opened_checkpoint(out) as file:
        return json.loads(file.metadata()["progress"]).get("target")


def below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
