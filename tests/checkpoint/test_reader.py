"""Invariant: a header that passes here opens in the safetensors library with the same tensors, and
no bytes, however damaged, raise anything but CheckpointError. The oracle is the library itself.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from sglang_ascend.checkpoint import CheckpointError, validate_checkpoint
from sglang_ascend.checkpoint.reader import DTYPE_BITS, read_header

FUZZ = settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
WHOLE = save(
    {
        "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
        "b.weight": torch.ones(5, dtype=torch.bfloat16),
        "empty": torch.ones(0, 7, dtype=torch.int8),
    },
    metadata={"format": "pt"},
)
HEADER_END = 8 + struct.unpack("<Q", WHOLE[:8])[0]


def library_tensors(content: bytes) -> dict[str, tuple[str, tuple[int, ...], int]] | None:
    """Name -> (dtype, shape, byte count), or None where the library refuses the file."""
    try:
        tensors = deserialize(content)
    except SafetensorError:
        return None
    return {n: (t["dtype"], tuple(t["shape"]), len(t["data"])) for n, t in tensors}


def our_tensors(folder: Path, content: bytes) -> dict[str, tuple[str, tuple[int, ...], int]] | None:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except CheckpointError as error:
        assert str(error).isprintable() and str(path) in str(error)
        return None
    return {n: (t.dtype, t.shape, t.num_bytes) for n, t in header.items()}


def assert_no_false_acceptance(folder: Path, content: bytes) -> None:
    ours = our_tensors(folder, content)
    if ours is not None:
        assert ours == library_tensors(content)


def test_whole_file_reads_as_in_the_library(tmp_path: Path) -> None:
    ours = our_tensors(tmp_path, WHOLE)
    assert ours is not None and ours == library_tensors(WHOLE)


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_has_the_width_of_the_library(tmp_path: Path, dtype: str) -> None:
    num_bytes = DTYPE_BITS[dtype]
    for size, accepted in ((num_bytes, True), (num_bytes + 1, False)):
        header = {"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}}
        content = with_header(header, size)
        assert (our_tensors(tmp_path, content) is not None) is accepted
        assert (library_tensors(content) is not None) is accepted


@FUZZ
@given(edits=st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(0, 255)), max_size=4))
def test_damaged_header_bytes_are_refused_or_harmless(tmp_path: Path, edits: list) -> None:
    content = bytearray(WHOLE)
    for position, value in edits:
        content[position] = value
    assert_no_false_acceptance(tmp_path, bytes(content))


@FUZZ
@given(length=st.integers(0, len(WHOLE) - 1))
def test_every_truncation_is_refused(tmp_path: Path, length: int) -> None:
    assert our_tensors(tmp_path, WHOLE[:length]) is None


SIZES = st.one_of(st.integers(-1, 12), st.sampled_from([2**31, 2**63, 2**64, 1.0, True, None, "4"]))
RECORD = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "F6_E2M3", "F99", "", None, 3]),
        "shape": st.lists(SIZES, max_size=3),
        "data_offsets": st.lists(SIZES, min_size=1, max_size=3),
    }
)
NAMES = st.sampled_from(["a", "b", "__metadata__", "\u2028", "\x1b[2J", ""])


def with_header(header: object, num_bytes: int) -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(num_bytes)


@FUZZ
@given(header=st.dictionaries(NAMES, RECORD, max_size=3), num_bytes=st.integers(0, 24))
def test_arbitrary_records_are_refused_or_harmless(
    tmp_path: Path, header: dict, num_bytes: int
) -> None:
    assert_no_false_acceptance(tmp_path, with_header(header, num_bytes))


@FUZZ
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4), extra=st.integers(-1, 1))
def test_wellformed_headers_are_accepted_exactly_when_the_library_accepts(
    tmp_path: Path, sizes: list[int], extra: int
) -> None:
    header, begin = {}, 0
    for index, size in enumerate(sizes):
        end = begin + 4 * size
        header[f"tensor{index}"] = {"dtype": "F32", "shape": [size], "data_offsets": [begin, end]}
        begin = end
    content = with_header(header, max(0, begin + extra))
    assert our_tensors(tmp_path, content) == library_tensors(content)


RECORD_A = '"dtype": "F32", "shape": [1], "data_offsets": [0, 4]'


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (f'{{"a": {{{RECORD_A}}}}}   ', True),
        (f'{{"a": {{{RECORD_A}, "more": []}}}}', True),
        (f'{{"a": {{{RECORD_A}, "dtype": "F32"}}}}', False),
        (f'{{"\\ud800": {{{RECORD_A}}}}}', False),
        (f'[{{"a": {{{RECORD_A}}}}}]', False),
        (f'{{"a": {{{RECORD_A}}}, "__metadata__": {{"step": 3}}}}', False),
    ],
)
def test_grammar_of_the_header_is_that_of_the_library(
    tmp_path: Path, header: str, accepted: bool
) -> None:
    content = struct.pack("<Q", len(header)) + header.encode() + bytes(4)
    assert (library_tensors(content) is not None) is accepted
    assert (our_tensors(tmp_path, content) is not None) is accepted


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
def test_damaged_json_raises_nothing_else(build, file: str) -> None:
    checkpoint = build("deepseek")
    whole = (checkpoint.folder / file).read_bytes()

    @settings(FUZZ, max_examples=100)
    @given(position=st.integers(0, len(whole) - 1), value=st.integers(0, 255))
    def damage_one_byte(position: int, value: int) -> None:
        damaged = whole[:position] + bytes([value]) + whole[position + 1 :]
        (checkpoint.folder / file).write_bytes(damaged)
        try:
            validate_checkpoint(checkpoint.folder)
        except CheckpointError as error:
            assert str(error).isprintable()

    damage_one_byte()
