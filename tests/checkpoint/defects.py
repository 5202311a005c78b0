"""Defects: each changes one thing of a TinyCheckpoint (see conftest.py), in place."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable

import torch
from safetensors.torch import load_file, save_file

BODY_SHARD = "model-00001-of-00002.safetensors"
MTP_SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
Mutation = Callable


def config_with(**fields: object) -> Mutation:
    def mutate(checkpoint) -> None:
        checkpoint.config.update(fields)
        checkpoint.save()

    return mutate


def config_without(field: str) -> Mutation:
    def mutate(checkpoint) -> None:
        del checkpoint.config[field]
        checkpoint.save()

    return mutate


def without_tensors(*fragments: str) -> Mutation:
    def mutate(checkpoint) -> None:
        for name in [n for n in checkpoint.tensors if any(f in n for f in fragments)]:
            del checkpoint.tensors[name]
        checkpoint.save()

    return mutate


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Mutation:
    def mutate(checkpoint) -> None:
        checkpoint.tensors[name] = change(checkpoint.tensors[name]).contiguous()
        checkpoint.save()

    return mutate


def with_value(name: str, value: float) -> Mutation:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return with_tensor(name, change)


def with_bytes(file: str, edit: Callable[[bytes], bytes]) -> Mutation:
    return lambda checkpoint: checkpoint.edit_bytes(file, edit)


def with_header(change: Callable[[dict], object]) -> Mutation:
    """Rewrites the header of the MTP shard and leaves its data as they are."""

    def edit(content: bytes) -> bytes:
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        change(header)
        encoded = json.dumps(header).encode()
        return struct.pack("<Q", len(encoded)) + encoded + content[8 + size :]

    return with_bytes(MTP_SHARD, edit)


def with_index(edit: Callable[[dict], object]) -> Mutation:
    return lambda checkpoint: checkpoint.edit_index(edit)


def without_file(*names: str) -> Mutation:
    def mutate(checkpoint) -> None:
        for name in names:
            (checkpoint.folder / name).unlink()

    return mutate


def only_pickles(checkpoint) -> None:
    without_file(BODY_SHARD, MTP_SHARD, INDEX)(checkpoint)
    (checkpoint.folder / "pytorch_model.bin").write_bytes(b"never read")


def tensor_held_twice(checkpoint) -> None:
    without_file(INDEX)(checkpoint)
    shutil.copy(checkpoint.folder / MTP_SHARD, checkpoint.folder / "old.safetensors")


def tensor_in_two_shards(checkpoint) -> None:
    """Both of which the index names."""
    body, mtp = (load_file(checkpoint.folder / name) for name in (BODY_SHARD, MTP_SHARD))
    name = next(iter(mtp))
    save_file(body | {name: mtp[name]}, checkpoint.folder / BODY_SHARD)


def shard_is_a_pipe(checkpoint) -> None:
    without_file(MTP_SHARD)(checkpoint)
    os.mkfifo(checkpoint.folder / MTP_SHARD)


def narrower(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :-1]


def shorter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


def first(header: dict) -> dict:
    return next(record for name, record in header.items() if name != "__metadata__")
