"""Which target wrote a file of tokens and hiddens: a fingerprint of its weights, kept in it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from sglang_ascend.training.generation.shards import TARGET, read_metadata
from sglang_ascend.training.provenance import digest
from sglang_ascend.training.targets.families import Target


def fingerprint(target: Target) -> str:
    """Of a few bytes amid every tensor but the MTP layer's: other weights differ there.

    What is zero there counts nothing, as the biases that a Llama gets with its layer.
    """
    own = [e for name, e in target.tensors.items() if not name.startswith(target.mtp_prefix)]
    found = {}
    for file, entries in groupby(sorted(own, key=lambda e: e.file), key=lambda e: e.file):
        with file.open("rb") as shard:
            for entry in entries:
                middle = entry.num_bytes // 2
                shard.seek(entry.offset + middle)
                found[entry.name] = shard.read(min(64, entry.num_bytes - middle))
    return digest([[name, part.hex()] for name, part in sorted(found.items()) if any(part)])


def checked_fingerprint(target: Target, shards: Iterable[Path]) -> str:
    """The target's own, which all of `shards` have that say who wrote them: on hiddens of other
    weights a layer would learn to draft for another model.

    Raises:
        ValueError: naming the first that another target wrote.
    """
    own = fingerprint(target)
    for path in shards:
        if read_metadata(path).get(TARGET, own) != own:
            raise ValueError(
                f"{path} was written by another target than {target.folder}: name that one as "
                "--target, or another --data."
            )
    return own
