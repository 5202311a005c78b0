"""Weights by whatever names SGLang takes them, where transformers finds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from sglang_ascend.checkpoint.reader import TensorEntry
from sglang_ascend.checkpoint.shards import INDEX_NAME
from sglang_ascend.files import write_json

_ALONE = "model.safetensors"


@contextmanager
def indexed(folder: Path, tensors: Mapping[str, TensorEntry]) -> Iterator[Path]:
    """`folder`, or one of links to its `tensors` with an index of them.

    SGLang loads every safetensors file where there is no index; transformers one of a fixed name.
    """
    shards = {entry.file for entry in tensors.values()}
    if (folder / INDEX_NAME).exists() or [shard.name for shard in shards] == [_ALONE]:
        yield folder
        return
    with TemporaryDirectory() as links:
        for path in (folder / "config.json", *shards):
            (Path(links) / path.name).symlink_to(path.resolve())
        places = {name: entry.file.name for name, entry in tensors.items()}
        write_json(Path(links) / INDEX_NAME, {"metadata": {}, "weight_map": places})
        yield Path(links)
