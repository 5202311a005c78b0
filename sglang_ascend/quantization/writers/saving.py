"""A safetensors file, or one sentence that says why it could not be written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes `tensors` to `path`.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written to; safetensors says so
            by an exception of its own, without the file.
    """
    try:
        save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise CheckpointError(
            f"{shown(path)} cannot be written ({error}); free space or correct the permissions "
            "there, and give the same command again"
        ) from None
