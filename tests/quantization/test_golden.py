"""Invariant: a checkpoint that msModelSlim wrote is read to its own numbers, and written again byte
by byte. Each weight is decoded, encoded, and placed: a wrong nibble or scale cannot survive."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.convert import convert
from sglang_ascend.quantization.writers import make_writer
from sglang_ascend.quantization.writers.modelslim import ModelSlimWriter

GOLDEN = Path(__file__).parents[1] / "data" / "modelslim-golden-tiny-qwen3"
SHARD = "quant_model_weights-00001-of-00001.safetensors"
WRITTEN = (SHARD, "quant_model_description.json", "quant_model_weights.safetensors.index.json")
NUMPY = {"F32": "<f4", "I64": "<i8", "I32": "<i4", "I8": "i1"}


def written_as(name: str, out: Path) -> Path:
    source = Checkpoint.open(GOLDEN)
    convert(source, out, make_writer(name, source.layout))
    return out


def arrays(path: Path) -> dict[str, np.ndarray]:
    """A safetensors file by hand."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, record in header.items():
        begin, end = record["data_offsets"]
        data = np.frombuffer(content[8 + size + begin : 8 + size + end], NUMPY[record["dtype"]])
        found[name] = data.reshape(record["shape"])
    return found


def decoded(tensors: dict[str, np.ndarray], types: dict[str, str]) -> dict[str, np.ndarray]:
    """The checkpoint in float64, from the definitions in the notes of msModelSlim's formats."""
    values = {}
    for name, array in tensors.items():
        module, _, suffix = name.rpartition(".")
        type_name = types[name]
        if type_name == "FLOAT":
            values[name] = array.astype("f8")
        if suffix != "weight" or type_name == "FLOAT":
            continue
        codes = array.astype("f8")
        if type_name == "W8A8":
            deq_scale = tensors[f"{module}.deq_scale"].astype("<i4").view("<f4").astype("f8")
            scale = (deq_scale / tensors[f"{module}.input_scale"].astype("f8"))[:, None]
        else:
            scale = tensors[f"{module}.weight_scale"].astype("f8")
        if type_name == "W4A8_DYNAMIC":
            nibbles = np.stack([array & 15, (array.view("u1") >> 4).view("i1")], 1)
            codes = nibbles.reshape(-1, array.shape[1]).astype("f8")
            codes[codes > 7] -= 16
        values[name] = codes * scale
    return values


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_modelslim_is_written_again_byte_by_byte(tmp_path):
    out = written_as("modelslim", tmp_path / "out")
    assert {name: sha256(out / name) for name in WRITTEN} == {
        name: sha256(GOLDEN / name) for name in WRITTEN
    }


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("pack_nibbles", lambda original: lambda codes: original(codes.flip(0))),
        ("_nibbles", lambda original: lambda module, weight: original("other", weight)),
    ],
    ids=["rows packed in another order", "scale_bias not split"],
)
def test_a_writer_that_packs_otherwise_writes_other_bytes(name, damage, tmp_path, monkeypatch):
    from sglang_ascend.quantization.writers import modelslim

    monkeypatch.setattr(modelslim, name, damage(getattr(modelslim, name)))
    out = written_as("modelslim", tmp_path / "out")
    assert sha256(out / SHARD) != sha256(GOLDEN / SHARD)


def test_float32_is_an_independent_decoding(tmp_path):
    types = json.loads((GOLDEN / "quant_model_description.json").read_text())
    expected = decoded(arrays(GOLDEN / SHARD), types)
    out = written_as("float32", tmp_path / "out")
    written = arrays(out / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, array in written.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6, atol=0, err_msg=name)
    fields = json.loads((out / "config.json").read_text())
    assert fields["dtype"] == "float32" and "quantization_config" not in fields
    tensors = arrays(GOLDEN / SHARD)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    tensors[name] = np.roll(tensors[name], 1, 0)
    off_by_a_row = decoded(tensors, types)["model.layers.1.mlp.up_proj.weight"]
    assert not np.allclose(written["model.layers.1.mlp.up_proj.weight"], off_by_a_row, rtol=1e-6)


def test_the_recorded_scale_bias_is_8_times_the_rows_that_were_read():
    """scale_bias was computed by msModelSlim from its float weights, so it checks our nibbles."""
    checkpoint = Checkpoint.open(GOLDEN)
    for module, scheme in checkpoint.schemes.items():
        if scheme.name == "W4A8_DYNAMIC":
            values = checkpoint.weight(module).dequantize().double().numpy()
            recorded = checkpoint.tensor(f"{module}.scale_bias").double().sum(1).numpy()
            np.testing.assert_allclose(recorded, 8 * values.sum(1), rtol=1e-5, atol=1e-6)


def test_compressed_tensors_and_back_keeps_every_code(tmp_path):
    """Through another layout that holds all but the folded form of static modules."""
    written_as("compressed-tensors", tmp_path / "compressed")
    source, other = Checkpoint.open(GOLDEN), Checkpoint.open(tmp_path / "compressed")
    assert other.schemes.keys() == source.schemes.keys()
    for module in source.schemes:
        assert other.weight(module).dequantize().equal(source.weight(module).dequantize())
        assert other.weight(module).input_rule == source.weight(module).input_rule
    convert(other, tmp_path / "back", ModelSlimWriter())
    shard = arrays(tmp_path / "back" / SHARD)
    for name, array in arrays(GOLDEN / SHARD).items():
        if "kv_cache" not in name and "deq_scale" not in name:
            np.testing.assert_array_equal(shard[name], array, err_msg=name)
