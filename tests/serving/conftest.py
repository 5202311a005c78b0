"""Running servers for the tests of this folder; tests with the same servers run in a row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quantized_checkpoints import Write, write_quantized
from reference_model import ReferenceModel
from server_pool import ServerPool
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sglang_ascend.models.catalog import model_path

DATA = Path(__file__).parent.parent / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that ask for the same servers run one after another, so that each starts once; all
    of them come first, for they take longest."""
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    others = [item for item in items if item not in set(mine)]
    items[:] = sorted(mine, key=_servers_of) + others


def _servers_of(item: pytest.Item) -> tuple[str, str, int]:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    variants = (str(params[k]) for k in ("dtype", "variant", "num_steps") if k in params)
    return (
        params.get("model", ""),
        next(variants, "broken" if "mistake" in params else ""),
        params.get("page_size", 1),
    )


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def reference_models() -> dict[Path, ReferenceModel]:
    """Loaded transformers models by folder, filled by whoever needs one first."""
    return {}


@pytest.fixture
def model_folder(model: str) -> Path:
    """Folder of the model that the test is parametrised with, built on first use."""
    return model_path(model)


@pytest.fixture
def reference(model_folder: Path, reference_models: dict[Path, ReferenceModel]) -> ReferenceModel:
    if model_folder not in reference_models:
        reference_models.clear()
        reference_models[model_folder] = ReferenceModel(model_folder)
    return reference_models[model_folder]


@pytest.fixture
def tokenizer(model_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="session")
def held_out_prompts() -> dict[str, list[str]]:
    """User messages that training never saw, by file name: tests/data/heldout_<name>.json."""
    return {
        path.stem.removeprefix("heldout_"): [row["prompt"] for row in json.loads(path.read_text())]
        for path in sorted(DATA.glob("heldout_*.json"))
    }


@pytest.fixture(scope="session")
def quantized_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.fixture
def write(model_folder: Path, quantized_folder: Path) -> Write:
    """Writes a quantized checkpoint once for each set of options."""

    def once(layout: str, **options: Any) -> Path:
        words = [layout, *(f"{key} {value}" for key, value in options.items())]
        folder = quantized_folder / " ".join(words).replace(" ", "-")
        exists = folder.exists()
        return folder if exists else write_quantized(model_folder, folder, layout, **options)

    return once
