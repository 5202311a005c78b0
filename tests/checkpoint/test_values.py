"""Invariant: the bit patterns called not finite are exactly those that torch calls NaN or infinite,
and one of them anywhere in a tensor is found. Exhaustive for 8 and 16 bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.checkpoint.reader import read_header
from sglang_ascend.checkpoint.values import (
    CHUNK_BYTES,
    NOT_FINITE,
    refuse_all_zero,
    refuse_not_finite,
)

NARROW = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
WIDE = {"F32": torch.float32, "F64": torch.float64, "C64": torch.complex64}
NON_FLOATS = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]


def entry_of(folder: Path, tensor: torch.Tensor):
    save_file({"before": torch.ones(3, dtype=torch.uint8), "x": tensor}, folder / "a.safetensors")
    return read_header(folder / "a.safetensors")["x"]


def test_every_float_format_has_a_pattern() -> None:
    assert NOT_FINITE.keys() == NARROW.keys() | WIDE.keys()


@pytest.mark.parametrize("dtype", NARROW)
def test_patterns_agree_with_torch_on_every_value(dtype: str) -> None:
    pattern = NOT_FINITE[dtype]
    width = NARROW[dtype].itemsize * 8
    bits = np.arange(1 << width, dtype=f"u{width // 8}")
    values = torch.from_numpy(bits).view(NARROW[dtype]).to(torch.float64)
    ours = (bits & bits.dtype.type(pattern.mask)) == pattern.pattern
    assert (ours == ~torch.isfinite(values).numpy()).all()


@pytest.mark.parametrize("dtype", [*NARROW.values(), *WIDE.values()])
@pytest.mark.parametrize("position", [0, CHUNK_BYTES // 8, -1])
def test_one_nan_is_found_wherever_it_lies(
    tmp_path: Path, dtype: torch.dtype, position: int
) -> None:
    tensor = torch.ones(CHUNK_BYTES // dtype.itemsize + 5).to(dtype)
    assert refuse_not_finite([entry_of(tmp_path, tensor)]) == tensor.nbytes
    tensor[position] = float("nan")
    with pytest.raises(CheckpointError, match="NaN or infinity in x"):
        refuse_not_finite([entry_of(tmp_path, tensor)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_finite_values_pass_and_infinity_does_not(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    largest = torch.finfo(dtype).max
    edge = torch.tensor([largest, -largest, torch.finfo(dtype).tiny, -0.0], dtype=dtype)
    refuse_not_finite([entry_of(tmp_path, edge)])
    with pytest.raises(CheckpointError):
        refuse_not_finite([entry_of(tmp_path, edge * 2)])


@pytest.mark.parametrize("dtype", NON_FLOATS)
def test_integers_are_never_called_not_finite(tmp_path: Path, dtype: torch.dtype) -> None:
    every_byte = torch.arange(256, dtype=torch.uint8)
    tensor = every_byte.bool() if dtype == torch.bool else every_byte.view(dtype)
    assert refuse_not_finite([entry_of(tmp_path, tensor)]) == 0


@pytest.mark.parametrize("dtype", [*NARROW.values(), *WIDE.values(), *NON_FLOATS])
def test_zeros_are_refused_and_one_other_value_passes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.zeros(CHUNK_BYTES + 8, dtype=torch.uint8).view(dtype)
    with pytest.raises(CheckpointError, match="only zeros in x"):
        refuse_all_zero(entry_of(tmp_path, tensor))
    tensor[-1] = 1
    refuse_all_zero(entry_of(tmp_path, tensor))


def test_file_cut_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    entry = entry_of(tmp_path, torch.ones(1000))
    entry.file.write_bytes(entry.file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="became shorter"):
        refuse_not_finite([entry])
