"""Reads tensor values in chunks and finds NaN, infinity and all-zero tensors, without torch.

Works on bit patterns, so bf16 and fp8 need no library type; memory stays at one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.reader import TensorEntry, open_regular_file

CHUNK_BYTES = 1 << 20  # fits the second-level cache: the scan then runs at the speed of the read


@dataclass(frozen=True)
class BitPattern:
    """A value v of this format is NaN or infinite when `v & mask == pattern`."""

    unsigned: str
    mask: int
    pattern: int


# Infinity and NaN have an exponent of ones; E4M3FN, FNUZ and E8M0 have no infinity and name NaN.
# Integers and 4- or 6-bit floats have neither.
NOT_FINITE = {
    "F64": BitPattern("<u8", 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
    "C64": BitPattern("<u4", 0x7F80_0000, 0x7F80_0000),
    "F32": BitPattern("<u4", 0x7F80_0000, 0x7F80_0000),
    "F16": BitPattern("<u2", 0x7C00, 0x7C00),
    "BF16": BitPattern("<u2", 0x7F80, 0x7F80),
    "F8_E5M2": BitPattern("u1", 0x7C, 0x7C),
    "F8_E4M3": BitPattern("u1", 0x7F, 0x7F),
    "F8_E5M2FNUZ": BitPattern("u1", 0xFF, 0x80),
    "F8_E4M3FNUZ": BitPattern("u1", 0xFF, 0x80),
    "F8_E8M0": BitPattern("u1", 0xFF, 0xFF),
}


def refuse_not_finite(tensors: Iterable[TensorEntry]) -> int:
    """Reads `tensors` once, in file order; returns the number of bytes read.

    Raises:
        CheckpointError: a tensor holds NaN or infinity, or its file shrank since its header was
            read.
    """
    num_bytes = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset)):
        pattern = NOT_FINITE.get(tensor.dtype)
        if pattern is None:
            continue
        num_bytes += tensor.num_bytes
        for chunk in _chunks(tensor, pattern.unsigned):
            np.bitwise_and(chunk, chunk.dtype.type(pattern.mask), out=chunk)
            if (chunk == pattern.pattern).any():
                raise CheckpointError(
                    f"{shown(tensor.file)} holds NaN or infinity in {shown(tensor.name)}; "
                    "export it again from finite weights"
                )
    return num_bytes


def refuse_all_zero(tensor: TensorEntry) -> None:
    """Refuses a tensor of zeros (of either sign): its weights were never loaded or trained.

    Raises:
        CheckpointError: every element of `tensor` is zero.
    """
    if is_all_zero(tensor):
        raise CheckpointError(
            f"{shown(tensor.file)} holds only zeros in {shown(tensor.name)}; "
            "export the trained MTP layer again"
        )


def is_all_zero(tensor: TensorEntry) -> bool:
    """Whether every element is zero, of either sign. Raises CheckpointError: the file shrank."""
    pattern = NOT_FINITE.get(tensor.dtype)
    unsigned = "u1" if pattern is None else pattern.unsigned
    width = np.dtype(unsigned).itemsize * 8
    magnitude = (1 << width) - 1 if pattern is None else (1 << (width - 1)) - 1
    for chunk in _chunks(tensor, unsigned):
        if (chunk & chunk.dtype.type(magnitude)).any():
            return False
    return True


def _chunks(tensor: TensorEntry, unsigned: str) -> Iterable[np.ndarray]:
    """The tensor's bytes as unsigned integers; each chunk is valid until the next is asked for."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open_regular_file(tensor.file) as file:
        file.seek(tensor.offset)
        remaining = tensor.num_bytes
        while remaining:
            view = buffer[: min(remaining, CHUNK_BYTES)]
            if file.readinto(view) != len(view):
                raise CheckpointError(
                    f"{shown(tensor.file)} became shorter while it was read; "
                    "copy or download it again"
                )
            remaining -= len(view)
            yield np.frombuffer(view, dtype=unsigned)
