"""Reads a whole checkpoint once and refuses what is wrong in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.families import find_family, mtp_tensors, target_tensors
from sglang_ascend.checkpoint.tensors import check_complete, modules_of
from sglang_ascend.checkpoint.values import refuse_not_finite
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.layouts.ours import SIDE_FILE, read_side_file, sha256

# scale_bias is a sum in float32, in the order of whoever wrote it.
SUM_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Verified:
    """How much was read and found right."""

    num_modules: int
    num_float_tensors: int
    num_bytes: int
    num_hashes: int


def verify(
    checkpoint: Checkpoint, progress: Callable[[int], object] = lambda num_bytes: None
) -> Verified:
    """Every tensor of the folder: hashes where there are any, scales, codes and finite floats;
    of a known family also whether all are there.

    Args:
        progress: called with the number of bytes that were read since.

    Raises:
        CheckpointError: the first thing that is wrong.
    """
    _check_whole(checkpoint)
    num_hashes = check_hashes(checkpoint)
    for module in checkpoint.schemes:
        weight = checkpoint.weight(module)
        if f"{module}.scale_bias" in checkpoint.entries:
            _check_sums(checkpoint, module, weight.dequantize())
        progress(sum(checkpoint.entries[name].num_bytes for name in checkpoint.names_of(module)))
    names = checkpoint.float_names()
    for name in names:
        entry = checkpoint.entries[name]
        refuse_not_finite([entry])
        progress(entry.num_bytes)
    return Verified(
        num_modules=len(checkpoint.schemes),
        num_float_tensors=len(names),
        num_bytes=sum(entry.num_bytes for entry in checkpoint.entries.values()),
        num_hashes=num_hashes,
    )


def check_hashes(checkpoint: Checkpoint) -> int:
    """The number of files whose SHA-256 is the recorded one; 0 where none is recorded.

    Raises:
        CheckpointError: a file that changed, or a shard without a hash.
    """
    side_file = checkpoint.folder / SIDE_FILE
    if not side_file.exists():
        return 0
    _, hashes = read_side_file(side_file)
    for name, recorded in hashes.items():
        if sha256(checkpoint.folder / name) != recorded:
            raise CheckpointError(
                f"{shown(checkpoint.folder / name)} is not the file whose SHA-256 is in "
                f"{SIDE_FILE}; copy the checkpoint again or quantize the model again"
            )
    for name in sorted({entry.file.name for entry in checkpoint.entries.values()} - hashes.keys()):
        raise CheckpointError(
            f"{shown(checkpoint.folder / name)} has no SHA-256 in {SIDE_FILE}; "
            "move it away or quantize the model again"
        )
    return len(hashes)


def _check_whole(checkpoint: Checkpoint) -> None:
    """All that config.json calls for is there in its shape, and of an MTP layer all or nothing."""
    config, entries = checkpoint.config, checkpoint.entries
    family = find_family(config)
    if family is None:
        return
    is_target = config.architecture == family.architecture  # and no MTP layer alone
    parts = [*target_tensors(family, config)] if is_target else []
    layer = mtp_tensors(family, config)
    own = layer[: 1 + len(family.norms)]  # what no decoder layer has
    if any(tensor.name in entries for tensor in own):
        parts.append(layer)
    modules = modules_of(entries) if config.quantized else frozenset[str]()
    check_complete(shown(checkpoint.folder), parts, entries, modules, config)


def _check_sums(checkpoint: Checkpoint, module: str, values: Tensor) -> None:
    """W4A8's scale_bias was computed from the weight, so it knows of nibbles in a wrong order."""
    recorded = checkpoint.tensor(f"{module}.scale_bias").float().sum(1)
    error = (recorded / 8 - values.sum(1)).abs()
    if bool((error > SUM_TOLERANCE * values.abs().sum(1)).any()):
        raise CheckpointError(
            f"{shown(f'{module}.scale_bias')} is not 8 times the sums of the rows of its weight; "
            "copy the checkpoint again or quantize the model again"
        )
