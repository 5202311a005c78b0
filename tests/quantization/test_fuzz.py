"""Invariant: whatever is done to the bytes of a quantized checkpoint or to its side files, reading
it ends in a refusal of one sentence or in finite numbers; a file that says the same is read to the
same numbers; and no file outside of the folder is opened or changed.

Mutations are drawn from a seed, so that a failure can be run again by its number.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import packers
import pytest
import torch
from test_refusals import PACKERS

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.layouts.ours import SIDE_FILE, write_side_file
from sglang_ascend.quantization.verification import verify

SHARD = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANY, FEW = 12_000, 1_400
WORDS = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63), 1e308, "", "..", "../x.safetensors",
    "/etc/passwd", "a\nb", "\ud800", "W8A8", "W4A8_DYNAMIC", "FLOAT", "gptq", "fp8", "group",
    "re:(", "re:.*", [], [1], [128, 128], {}, {"a": 1},
)  # fmt: skip
DTYPES = ("I8", "I32", "I64", "U8", "F32", "F16", "BF16", "F8_E4M3", "F4", "BOOL", "X9")


def build(name: str, folder: Path) -> None:
    """A whole checkpoint with all the side files that it may have."""
    packed = PACKERS[name.removeprefix("ours ")]()
    packed.write(folder)
    weight_map = dict.fromkeys(packed.tensors, SHARD)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if name.startswith("ours "):
        write_side_file(folder, {"weights": "int8"})


NAMES = (*PACKERS, "ours modelslim")


def change_value(rng: random.Random, value: Any) -> Any:
    """One value somewhere in a JSON document is replaced, removed, renamed or repeated."""
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in items:
            places.append((node, key))
            if isinstance(child, dict | list):
                collect(child)

    collect(value)
    if not places:
        return rng.choice(WORDS)
    node, key = rng.choice(places)
    action = rng.randrange(4)
    if action == 0:
        del node[key]
    elif action == 1 and isinstance(node, dict):
        node[f"{key}{rng.choice(('x', '.', ' '))}"] = node.pop(key)
    elif action == 2:
        other, name = rng.choice(places)
        copied = other[name] if other is not node else None
        node[key] = json.loads(json.dumps(copied)) if copied is not value else None
    else:
        node[key] = rng.choice(WORDS)
    return value


def change_json(rng: random.Random, folder: Path) -> None:
    path = rng.choice(sorted(folder.glob("*.json")))
    value = json.loads(path.read_text())
    for _ in range(rng.randint(1, 2)):
        value = change_value(rng, value)
        if not isinstance(value, dict | list):
            break
    path.write_text(json.dumps(value))


def change_header(rng: random.Random, folder: Path) -> None:
    """One record: its name, dtype, shape or place; the data stay."""
    content = (folder / SHARD).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = rng.choice(sorted(header))
    record = header[name]
    action = rng.randrange(6)
    if action == 0:
        header[name + rng.choice(("x", "_scale", ".weight"))] = header.pop(name)
    elif action == 1:
        record["dtype"] = rng.choice(DTYPES)
    elif action == 2:
        record["shape"] = record["shape"][::-1]
    elif action == 3:
        record["shape"] = [1, *record["shape"]] if rng.random() < 0.5 else record["shape"][1:]
    elif action == 4:
        record["shape"] = rng.choice(([2**62, 2**62], [0], [-1, -1], [2**40], []))
    else:
        other = rng.choice(sorted(header))
        header[name], header[other] = header[other], header[name]
    encoded = json.dumps(header).encode()
    (folder / SHARD).write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + size :])


def as_other_tensor(rng: random.Random, folder: Path) -> None:
    """One tensor of a valid file becomes another dtype, loses a part, or is gone."""
    content = (folder / SHARD).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    tensors = {}
    for name, record in header.items():
        begin, end = record["data_offsets"]
        tensors[name] = record, content[8 + size + begin : 8 + size + end]
    name = rng.choice(sorted(tensors))
    record, data = tensors[name]
    shape, action = record["shape"], rng.randrange(4)
    if action == 0:
        del tensors[name]
    elif action == 1 and shape and shape[0] > 1:
        kept = rng.randrange(shape[0])
        width = len(data) // shape[0]
        tensors[name] = {**record, "shape": [kept, *shape[1:]]}, data[: kept * width]
    elif action == 2:
        repeated = {**record, "shape": [shape[0] * 2, *shape[1:]]}
        tensors[name] = repeated, data * 2
    else:
        tensors[name] = {"dtype": "U8", "shape": [len(data)]}, data
    offset, records = 0, {}
    for held, (record, data) in tensors.items():
        records[held] = {**record, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    encoded = json.dumps(records).encode()
    body = b"".join(data for _, data in tensors.values())
    (folder / SHARD).write_bytes(len(encoded).to_bytes(8, "little") + encoded + body)


def change_bytes(rng: random.Random, folder: Path) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 8))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(content)


def cut(rng: random.Random, folder: Path) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    content = path.read_bytes()
    at = rng.randrange(len(content))
    path.write_bytes(content[:at] if rng.random() < 0.7 else content + content[:at])


def rename(rng: random.Random, folder: Path) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    path.rename(folder / f"x{path.name}")


def say_the_same(rng: random.Random, folder: Path) -> None:
    """Other bytes, the same meaning: the keys of a JSON file in another order."""
    candidates = [path for path in folder.glob("*.json") if not (folder / SIDE_FILE).exists()]
    if candidates:
        path = rng.choice(sorted(candidates))
        content = json.loads(path.read_text())
        path.write_text(json.dumps(dict(reversed(content.items())), indent=1))


MUTATIONS: tuple[Callable[[random.Random, Path], None], ...] = (
    change_json,
    change_json,
    change_header,
    as_other_tensor,
    change_bytes,
    cut,
    rename,
    say_the_same,
)


@contextmanager
def watched() -> Iterator[list[str]]:
    """The paths that are opened meanwhile, and every other touch of the file system that audits."""
    opened: list[str] = []
    active = [True]

    def hook(event: str, arguments: tuple) -> None:
        watches = event == "open" or event.startswith(("os.", "shutil.", "subprocess."))
        if active[0] and watches and arguments and isinstance(arguments[0], str | bytes | Path):
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)  # cannot be removed, only told to stop
    try:
        yield opened
    finally:
        active[0] = False


def outside(opened: list[str], folder: Path) -> list[str]:
    """Those of `opened` that lie in another folder, also by way of ".."."""
    return [path for path in opened if not os.path.normpath(path).startswith(str(folder))]


def values_of(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(folder)
    verify(checkpoint)
    return {module: checkpoint.weight(module).dequantize() for module in checkpoint.schemes}


def run_mutation(seed: int, originals: dict, folder: Path, opened: list[str]) -> str:
    """What became of one mutated checkpoint: refused, read, or the same numbers."""
    rng = random.Random(seed)
    name = rng.choice(NAMES)
    for path in folder.iterdir():
        path.unlink()
    for file, content in originals[name][0].items():
        (folder / file).write_bytes(content)
    mutation = rng.choice(MUTATIONS)
    mutation(rng, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    opened.clear()
    try:
        values = values_of(folder)
    except CheckpointError as error:
        assert mutation is not say_the_same, error
        sentence = str(error)
        assert "\n" not in sentence and len(sentence) < 2000, sentence
        outcome = "refused"
    else:
        expected = originals[name][1]
        same = values.keys() == expected.keys() and all(
            values[m].shape == expected[m].shape and values[m].equal(expected[m]) for m in values
        )
        assert same or mutation is not say_the_same
        assert all(value.isfinite().all() for value in values.values())
        outcome = "same" if same else "read"
    assert outside(opened, folder) == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    return outcome


def run_mutations(count: int, first_seed: int, tmp_path: Path) -> dict[str, int]:
    originals = {}
    for name in NAMES:
        folder = tmp_path / name
        folder.mkdir()
        build(name, folder)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        originals[name] = files, values_of(folder)
    folder = tmp_path / "mutated"
    folder.mkdir()
    counts = {"refused": 0, "read": 0, "same": 0}
    with watched() as opened:
        for seed in range(first_seed, first_seed + count):
            try:
                counts[run_mutation(seed, originals, folder, opened)] += 1
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
    return counts


def test_mutated_checkpoints_are_refused_or_read(tmp_path):
    counts = run_mutations(FEW, 0, tmp_path)
    assert sum(counts.values()) == FEW
    assert min(counts.values()) > FEW // 100, counts  # each way out is taken


@pytest.mark.slow
def test_more_than_ten_thousand_mutated_checkpoints_are_refused_or_read(tmp_path):
    counts = run_mutations(MANY, 1_000_000, tmp_path)
    assert sum(counts.values()) == MANY
    assert min(counts.values()) > MANY // 100, counts


def test_the_watch_sees_a_file_outside_of_the_folder(tmp_path):
    """The control of the last claim: a reader that follows a path out of the folder is caught."""
    packers.modelslim().write(tmp_path / "in")
    (tmp_path / "secret.json").write_text("{}")
    with watched() as opened:
        Checkpoint.open(tmp_path / "in")
        assert opened and outside(opened, tmp_path / "in") == []
        (tmp_path / "in" / ".." / "secret.json").read_text()
    assert [Path(path).name for path in outside(opened, tmp_path / "in")] == ["secret.json"]
