"""The models that this package can build by name, and the cache folder that holds them."""

from __future__ import annotations

import hashlib
import importlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from sglang_ascend.env import CACHE
from sglang_ascend.files import new_folder

_KEY_FILE = "content-key.txt"


@dataclass(frozen=True)
class Model:
    """A buildable model: the module whose `build(folder)` writes it, and what it is built from."""

    module: str
    artifact: str  # folder under models/artifacts, from which it takes files

    @property
    def sources(self) -> list[Path]:
        """Files whose content decides the result; a change in any rebuilds the model."""
        models = Path(__file__).parent
        module = models / f"{self.module.rsplit('.', 1)[1]}.py"
        artifact = models / "artifacts" / self.artifact
        return [module, *sorted(path for path in artifact.rglob("*") if path.is_file())]


MODELS = {
    "smollm2-mtp": Model("sglang_ascend.models.smollm2", "smollm2-mtp"),
    "nano-deepseek": Model("sglang_ascend.models.nano_deepseek", "nano-deepseek"),
    "random-deepseek": Model("sglang_ascend.models.random_deepseek", "nano-deepseek"),
}


def model_path(name: str, cache_dir: Path | None = None) -> Path:
    """The ready checkpoint folder of `name`, built on first use and after its sources changed.

    Args:
        name: a key of `MODELS`.
        cache_dir: where folders live; default $SGLANG_ASCEND_CACHE, else ~/.cache/sglang-ascend.

    Raises:
        ValueError: unknown name.
        FileNotFoundError: a source of the model is missing; the message names the remedy.
    """
    if name not in MODELS:
        raise ValueError(f"{name!r} is not a model of this package: choose {' or '.join(MODELS)}.")
    model = MODELS[name]
    cache = cache_dir or CACHE.get()
    cache.mkdir(parents=True, exist_ok=True)
    folder, key = cache / name, _content_key(model)
    if _built_key(folder) == key:
        return folder
    with FileLock(cache / f"{name}.lock"):
        if _built_key(folder) != key:
            _build(model, name, folder, key)
    return folder


def _build(model: Model, name: str, folder: Path, key: str) -> None:
    """Builds beside `folder` and renames: no reader finds half a model."""
    from rich.console import Console

    with new_folder(folder) as made:
        Console(stderr=True).print(f"building {name} in {folder}, once", soft_wrap=True)
        importlib.import_module(model.module).build(made)
        (made / _KEY_FILE).write_text(key)
        shutil.rmtree(folder, ignore_errors=True)


def _content_key(model: Model) -> str:
    digest = hashlib.sha256()
    for path in model.sources:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _built_key(folder: Path) -> str | None:
    path = folder / _KEY_FILE
    return path.read_text() if path.is_file() else None
