"""Reads what a checkpoint declares: JSON files and safetensors headers, never tensor values.

Every bound is checked before memory is spent on it; nothing is unpickled or executed.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from sglang_ascend.checkpoint.errors import CheckpointError, shown

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself
MAX_JSON_BYTES = 100_000_000
LENGTH_BYTES = 8  # the little-endian header length that opens a safetensors file
MAX_DECLARED_SIZE = 2**63

# The names and widths of the safetensors format, version 0.8.
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
RECORD_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
PLAIN_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as a safetensors header declares it; offset counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int


def open_regular_file(path: Path) -> BufferedReader:
    """Opens `path` for reading.

    Raises:
        CheckpointError: it is missing, unreadable or not a regular file (a pipe would block).
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{shown(path)} is not a regular file; replace it by the file")
        return path.open("rb")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CheckpointError(
            f"{shown(path)} cannot be read ({reason}); copy or download it again, "
            "or correct its permissions"
        ) from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: missing, unreadable, larger than MAX_JSON_BYTES or no JSON object.
    """
    with open_regular_file(path) as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{shown(path)} is larger than {MAX_JSON_BYTES} bytes; replace it by the original file"
        )
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{shown(path)} is not valid JSON; correct it or download it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{shown(path)} does not hold a JSON object; correct it or download it again"
        )
    return value


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors that the safetensors file `path` declares, by name.

    Accepts what the safetensors library accepts: a JSON header of at most MAX_HEADER_BYTES whose
    tensors fill the rest of the file without gap or overlap, each as large as dtype and shape say.

    Raises:
        CheckpointError: unreadable, truncated, or a header that breaks one of these rules.
    """
    with open_regular_file(path) as file:
        file_size = os.fstat(file.fileno()).st_size
        if file_size < LENGTH_BYTES:
            raise _truncated(path, LENGTH_BYTES, file_size)
        header_size = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if header_size > MAX_HEADER_BYTES:
            raise _corrupt(path, f"its header would be longer than {MAX_HEADER_BYTES} bytes")
        content = file.read(header_size)
    if len(content) < header_size:
        raise _truncated(path, LENGTH_BYTES + header_size, file_size)
    try:
        header = json.loads(content.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, "it is not valid JSON") from error
    if not isinstance(header, dict):
        raise _corrupt(path, "it is not a JSON object")
    _check_metadata(path, header.pop("__metadata__", None))
    data_start = LENGTH_BYTES + header_size
    tensors = [_entry(path, name, record, data_start) for name, record in header.items()]
    data_end = _check_tiling(path, tensors, data_start)
    if data_end > file_size:
        raise _truncated(path, data_end, file_size)
    if data_end < file_size:
        raise _corrupt(path, f"{file_size - data_end} bytes at the end belong to no tensor")
    return {tensor.name: tensor for tensor in tensors}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a repeated key and one with a lone surrogate, as the library's parser does."""
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("repeated key")
    for key in record:
        key.encode("utf-8")
    return record


def _check_metadata(path: Path, metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _corrupt(path, "__metadata__ is not a map of strings")


def _entry(path: Path, name: str, record: Any, data_start: int) -> TensorEntry:
    """The entry of one header record, its byte count checked against dtype and shape."""
    if not isinstance(record, dict) or not record.keys() >= RECORD_FIELDS:
        raise _corrupt(path, f"{shown(name)} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = record["dtype"], record["shape"], record["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _corrupt(path, f"{shown(name)} has the unknown dtype {shown(dtype)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _corrupt(path, f"{shown(name)} has a malformed shape or data_offsets")
    begin, end = offsets
    num_bits = math.prod(shape) * DTYPE_BITS[dtype]
    if num_bits >= MAX_DECLARED_SIZE or num_bits != (end - begin) * 8:
        raise _corrupt(
            path, f"{shown(name)} of {dtype} {shape} does not fill its data_offsets {offsets}"
        )
    return TensorEntry(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < MAX_DECLARED_SIZE for size in value
    )


def _check_tiling(path: Path, tensors: Iterable[TensorEntry], data_start: int) -> int:
    """Where the tensors end, once it is sure that they follow each other without gap or overlap."""
    position = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != position:
            problem = (
                "overlaps the tensor before it"
                if tensor.offset < position
                else ("leaves a gap before it")
            )
            raise _corrupt(path, f"{shown(tensor.name)} {problem}")
        position += tensor.num_bytes
    return position


def _truncated(path: Path, expected: int, actual: int) -> CheckpointError:
    return CheckpointError(
        f"{shown(path)} is truncated: it declares {expected} bytes and has {actual}; "
        "copy or download it again"
    )


def _corrupt(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{shown(path)} has a corrupt safetensors header: {reason}; copy or download it again"
    )
