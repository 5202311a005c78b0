"""Invariant: a conversion means the same numbers, in files that compressed-tensors' own library
reads; it appears whole or not at all, and overwrites nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import packers
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from test_layouts import CASES, FP8, INT, PLAIN, TENSOR, TOKEN
from transformers import AutoConfig

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.convert import convert
from sglang_ascend.quantization.formats import INT4
from sglang_ascend.quantization.weight import QuantizedWeight
from sglang_ascend.quantization.writers import make_writer
from sglang_ascend.quantization.writers.compressed_tensors import CompressedTensorsWriter

TARGETS = ("modelslim", "compressed-tensors", "float32")
# ModelSlim has no type for orders of columns, weight-only FP8 and FP8 inputs in groups;
# compressed-tensors none for orders of columns in groups that do not divide them.
CUT_ACT_ORDER = {"gptq act-order 240", "packed act-order"}
FP8_CASES = {case for case in CASES if case.startswith("fp8")}
REFUSED = {
    "modelslim": CUT_ACT_ORDER | FP8_CASES | {"gptq act-order"},
    "compressed-tensors": CUT_ACT_ORDER,
}
# The library guesses the size of a block from a count and ignores block_structure: no cut ones.
LIBRARY_CASES = [
    case
    for case in CASES
    if case not in {*CUT_ACT_ORDER, "fp8", "fp8 of other blocks", "fp8 blocks"}
]


def open_case(case: str, folder: Path) -> Checkpoint:
    return Checkpoint.open(CASES[case]().write(folder))


def convert_to(target: str, source: Checkpoint, out: Path) -> Checkpoint:
    convert(source, out, make_writer(target, source.layout))
    return Checkpoint.open(out)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_a_conversion_means_the_same_numbers(case, target, tmp_path):
    source = open_case(case, tmp_path / "source")
    if case in REFUSED.get(target, ()):
        with pytest.raises(CheckpointError, match=r"a\.q_proj .* cannot hold; convert to float32"):
            convert_to(target, source, tmp_path / "out")
        return
    other = convert_to(target, source, tmp_path / "out")
    for name in source.float_names():
        if not source.layout.is_own(name):
            written = other.tensor(name)
            assert written.equal(source.tensor(name).to(written.dtype))
    for module in source.schemes:
        weight = source.weight(module)
        if target == "float32":
            assert other.tensor(f"{module}.weight").equal(weight.dequantize())
        else:
            assert other.weight(module).dequantize().equal(weight.dequantize())
            assert other.weight(module).input_rule == weight.input_rule


def library_values(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a compressed-tensors folder, by the library itself."""
    fields = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(fields)
    tensors = load_file(folder / "model.safetensors")
    values = {}
    for name, group in config.config_groups.items():
        targets = group.targets
        if targets == ["Linear"]:
            scaled = (n.rpartition(".") for n in tensors if n.endswith(".weight_scale"))
            targets = [module for module, _, _ in scaled]
        compressor = BaseCompressor.get_value_from_registry(fields["config_groups"][name]["format"])
        for module in targets:
            prefix = f"{module}."
            held = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            values[module] = compressor.decompress(held, group)["weight"]
    return values


@pytest.mark.parametrize("case", LIBRARY_CASES)
def test_the_library_of_compressed_tensors_reads_what_is_written(case, tmp_path):
    source = open_case(case, tmp_path / "source")
    convert_to("compressed-tensors", source, tmp_path / "out")
    values = library_values(tmp_path / "out")
    assert values.keys() == source.schemes.keys()
    for module, value in values.items():
        torch.testing.assert_close(
            value.float(), source.weight(module).dequantize(), rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize(
    ("weights", "file_format", "inputs"),
    [
        (INT, "pack-quantized", None),
        ({**INT, "num_bits": 8, "group_size": 16}, "pack-quantized", None),
        (PLAIN, "int-quantized", TOKEN),
        (PLAIN, "int-quantized", TENSOR),
        (FP8, "float-quantized", {**TOKEN, "type": "float"}),
    ],
    ids=["int4 asymmetric", "int8 groups", "int8", "int8 static", "fp8"],
)
def test_what_the_library_writes_is_read_to_its_own_numbers(weights, file_format, inputs, tmp_path):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    settings = {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "config_groups": {"group_0": group},
        "ignore": [],
    }
    scheme = QuantizationConfig.model_validate(settings).config_groups["group_0"]
    generator = torch.Generator().manual_seed(0)
    num_groups = 1 if weights["strategy"] == "channel" else 96 // weights["group_size"]
    held = {
        "weight": torch.randn(16, 96, generator=generator),
        "weight_scale": torch.rand(16, num_groups, generator=generator) / 8 + 0.01,
    }
    if not weights["symmetric"]:
        zeros = torch.randint(-5, 6, (16, num_groups), generator=generator, dtype=torch.int8)
        held["weight_zero_point"] = zeros
    compressor = BaseCompressor.get_value_from_registry(file_format)
    compressed = compressor.compress(held, scheme)
    expected = compressor.decompress(compressed, scheme)["weight"]
    if inputs is not None and not inputs["dynamic"]:
        compressed |= {"input_scale": torch.tensor([0.5])}
        compressed |= {"input_zero_point": torch.tensor([3], dtype=torch.int8)}
    save_file({f"a.{n}": t.contiguous() for n, t in compressed.items()}, tmp_path / "x.safetensors")
    config = {**packers.ARCHITECTURE, "quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight = Checkpoint.open(tmp_path).weight("a")
    torch.testing.assert_close(weight.dequantize(), expected.float(), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(weight.rows(1, 16).dequantize(), expected[:-1].float())


def split(folder: Path) -> None:
    """The shard of a folder as two, with one module across both, and their index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in halves.items() for name in held}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("target", TARGETS)
def test_modules_across_two_shards_are_converted_whole_and_once(target, tmp_path):
    packers.modelslim().write(tmp_path / "whole")
    packers.modelslim().write(tmp_path / "split")
    split(tmp_path / "split")
    whole = convert_to(target, Checkpoint.open(tmp_path / "whole"), tmp_path / "a")
    parts = convert_to(target, Checkpoint.open(tmp_path / "split"), tmp_path / "b")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) == 2
    assert whole.entries.keys() == parts.entries.keys()
    for name in whole.entries:
        assert whole.tensor(name).view(torch.uint8).equal(parts.tensor(name).view(torch.uint8))


def test_a_float_checkpoint_becomes_float32(tmp_path):
    raw, values = packers.bf16(torch.randn(4, 6).numpy())
    packers.Packed({"a.weight": raw}, {}).write(tmp_path / "in")
    out = convert_to("float32", Checkpoint.open(tmp_path / "in"), tmp_path / "out")
    assert out.tensor("a.weight").numpy().tobytes() == values.tobytes()


@pytest.mark.parametrize("named", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype"), ()])
def test_a_float32_checkpoint_is_read_as_one(named, tmp_path):
    """By whatever name config.json has for it: of two transformers takes the newer."""
    raw = packers.bf16(torch.randn(4, 6).numpy())[0]
    config = {**packers.ARCHITECTURE, "model_type": "qwen2"} | dict.fromkeys(named, "bfloat16")
    source = Checkpoint.open(packers.Packed({"a.weight": raw}, {}, config).write(tmp_path / "in"))
    convert_to("float32", source, tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.float32


def test_companions_are_copied_but_neither_code_nor_weights_of_other_kinds(tmp_path):
    folder = packers.gptq().write(tmp_path / "in")
    for name in ("tokenizer.json", "chat_template.jinja", "model.py", "old.bin", "quant.json.bak"):
        (folder / name).write_text("{}")
    convert_to("float32", Checkpoint.open(folder), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in (tmp_path / "out").iterdir())


def test_nothing_is_overwritten_and_nothing_half_written_stays(tmp_path):
    source = open_case("gptq act-order", tmp_path / "in")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="out exists; name a new folder"):
        convert_to("float32", source, tmp_path / "out")
    (tmp_path / "out").rmdir()
    with pytest.raises(CheckpointError, match="cannot hold"):
        convert_to("modelslim", source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    shutil.copy(tmp_path / "in" / "model.safetensors", tmp_path / "in" / "copy.safetensors")
    with pytest.raises(CheckpointError, match="both hold"):
        Checkpoint.open(tmp_path / "in")


def test_float_zero_points_are_not_rounded_into_a_layout_of_integers():
    weight = QuantizedWeight(
        codes=torch.zeros(4, 8, dtype=torch.int8),
        scale=torch.ones(4, 1),
        zero=torch.full((4, 1), 0.5),
        block=(1, 8),
        number_format=INT4,
    )
    with pytest.raises(CheckpointError, match=r"a\.q_proj has zero points that are no int4"):
        CompressedTensorsWriter().write("a.q_proj", weight)


SHARD_BYTES, NUM_SHARDS = 8 << 20, 12
PEAK = """
import re, sys
from pathlib import Path
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.convert import convert
from sglang_ascend.quantization.writers import make_writer

def peak():  # of this process alone; getrusage would count the parent that it was forked from
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

folder, out, warm, way = map(Path, sys.argv[1:])
for source, target in ((warm, out / "warm"), (folder, out / "whole")):
    before = peak()
    checkpoint = Checkpoint.open(source)
    if way.name == "streamed":
        convert(checkpoint, target, make_writer("modelslim", checkpoint.layout))
    else:
        kept = [checkpoint.tensor(name) for name in checkpoint.entries]
print(peak() - before)
"""


def test_a_conversion_holds_one_shard_in_memory(tmp_path):
    """The shard and the bytes that are written of it; the control reads the whole checkpoint."""
    raw = packers.f32(torch.rand(SHARD_BYTES // 4).numpy())
    for name, count in (("warm", 1), ("whole", NUM_SHARDS)):
        folder = packers.Packed({}, {}).write(tmp_path / name)
        (folder / "model.safetensors").unlink()
        for number in range(count):
            path = folder / f"model-{number:02d}.safetensors"
            packers.write_safetensors(path, {f"layer{number}.weight": raw})

    def peak(way: str) -> int:
        arguments = [tmp_path / "whole", tmp_path / way, tmp_path / "warm", way]
        program = [sys.executable, "-c", PEAK, *map(str, arguments)]
        done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
        return int(done.stdout)

    assert peak("streamed") < 4 * SHARD_BYTES
    assert peak("at once") > (NUM_SHARDS - 4) * SHARD_BYTES
