"""Invariant: `inspect`, `verify` and `convert` say what a checkpoint is, and end with 0 when it is
sound, with 2 and one sentence when it is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import packers
import pytest
from safetensors.torch import load_file, save_file
from tiny_targets import write_target
from typer.testing import CliRunner

from sglang_ascend.cli import app
from sglang_ascend.ops import quantized as ops
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.layouts.ours import SIDE_FILE
from sglang_ascend.training.export import export
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import new_layer

GOLDEN = Path(__file__).parents[1] / "data" / "modelslim-golden-tiny-qwen3"
SHARD = "quant_model_weights-00001-of-00001.safetensors"


def run(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def test_inspect_counts_every_byte_of_the_shards_once():
    found = json.loads(run("inspect", GOLDEN, "--json").stdout)
    assert found["layout"] == "modelslim"
    num_bytes = sum(share["num_bytes"] for share in found["totals"].values())
    content = (GOLDEN / SHARD).read_bytes()
    assert num_bytes == len(content) - 8 - int.from_bytes(content[:8], "little")
    # 64 kv rows and 128 q and o rows, of 128 inputs each, with scale and offset.
    rows = 64 + 64 + 128 + 128
    expected = {"num_modules": 4, "num_bytes": rows * (128 + 4 + 4)}
    assert found["layers"]["model.layers.0"]["W8A8_DYNAMIC"] == expected
    assert found["schemes"]["model.layers.1.mlp.up_proj"] == "W4A8_DYNAMIC"
    assert "lm_head" not in found["schemes"]


def test_inspect_names_the_body_that_multiplies_each_weight_here(tmp_path, monkeypatch):
    packed = packers.modelslim()
    renamed = {"a.W8A16": "a.kv_b_proj", "a.static": "a.experts.0.up_proj"}
    renamed["a.W8A8_DYNAMIC"] = "a.experts.1.up_proj"
    types = packed.files["quant_model_description.json"]
    for names in (packed.tensors, types):
        for name in list(names):
            module, _, suffix = name.rpartition(".")
            names[f"{renamed.get(module, module)}.{suffix}" if module else name] = names.pop(name)
    expected = {
        "a.kv_b_proj": "decoded to float",
        "a.experts.0.up_proj": "none: convert",  # static inputs of experts
        "a.W4A4_DYNAMIC": "decoded to float",
        "a.fp8": "numba",
    }
    integers = ("a.experts.1.up_proj", "a.down_proj", "a.static_bf16", "a.mix")
    linear, grouped = ops.integer_linear, ops.grouped_integer_linear
    # The first product that is exact; fbgemm's is of int8 per token, and has no grouped form.
    for exact, bodies in (
        ("numba", ["numba"] * 4),
        ("fbgemm", ["reference"] * 3 + ["fbgemm"]),
        ("none", ["reference"] * 4),
    ):
        for op in (linear, grouped, ops.prepare_integer):
            monkeypatch.setattr(op, "_bodies", {})
            for name, body in list(op._implementations.items()):
                if name in ("numba", "fbgemm"):
                    chosen = replace(body, available=lambda name=name, exact=exact: name == exact)
                    monkeypatch.setitem(op._implementations, name, chosen)
        folder = packed.write(tmp_path / exact)
        found = json.loads(run("inspect", folder, "--json").stdout)["cpu_products"]
        wanted = expected | dict(zip(integers, bodies, strict=True))
        assert found == {module: wanted[module] for module in found}
        assert found.keys() == wanted.keys()
        table = run("inspect", folder).stdout
        assert "none: convert" in table and bodies[3] in table


def test_inspect_shows_a_row_for_each_run_of_equal_layers(tmp_path):
    raw = packers.f32(np.ones((2, 4)))
    tensors = {f"model.layers.{n}.a.weight": raw for n in range(12) if n != 5}
    packers.Packed({**tensors, "lm_head.weight": raw}, {}).write(tmp_path)
    lines = run("inspect", tmp_path).stdout
    assert [word for word in lines.split() if word.startswith("model.layers")] == [
        "model.layers.0-4",
        "model.layers.6-11",
    ]


def test_inspect_shows_names_as_they_are_and_no_escape_in_them(tmp_path):
    packed = packers.gptq()
    for name in list(packed.tensors):
        packed.tensors[name.replace("a.q_proj", "a[/b]\x1b.0.q_proj")] = packed.tensors.pop(name)
    lines = run("inspect", packed.write(tmp_path)).stdout
    assert "a[/b]\N{REPLACEMENT CHARACTER}.0" in lines and "\x1b" not in lines


def test_verify_says_what_it_read():
    assert "is sound: 14 quantized modules, 19 float tensors" in run("verify", GOLDEN).stdout
    assert json.loads(run("verify", GOLDEN, "--json").stdout) == {
        "num_modules": 14,
        "num_float_tensors": 19,
        "num_bytes": 804376,
        "num_hashes": 0,
    }


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_refusal_is_one_line_and_exit_code_2(command, tmp_path):
    packed = packers.gptq()
    del packed.tensors["a.q_proj.scales"]
    result = run(command, packed.write(tmp_path), code=2)
    assert result.stderr.startswith("sglang-ascend: a.q_proj.scales is missing")
    assert result.stderr.count("\n") == 1
    assert "no folder" in run(command, tmp_path / "gone", code=2).stderr


@pytest.mark.parametrize("target", ["modelslim", "compressed-tensors", "float32"])
def test_convert_writes_a_checkpoint_that_verify_accepts(target, tmp_path):
    run("convert", GOLDEN, tmp_path / "out", "--to", target)
    run("verify", tmp_path / "out")
    assert len(Checkpoint.open(tmp_path / "out").schemes) == (0 if target == "float32" else 14)
    result = run("convert", GOLDEN, tmp_path / "out", "--to", target, code=2)
    assert "out exists; name a new folder" in result.stderr


@pytest.mark.parametrize("family", ["MiMoForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("recipe", [None, "w8a8"])
def test_verify_misses_every_tensor_that_a_known_family_has(family, recipe, tmp_path):
    """As a copy that lost a shard, where no index tells."""
    plain = Target.open(write_target(tmp_path / "plain", family))
    folder = tmp_path / "whole"
    export(plain, new_layer(plain, seed=0), folder)
    if recipe:
        run("quantize", folder, "--recipe", recipe, "--out", tmp_path / recipe)
        folder = tmp_path / recipe
        for path in (folder / SIDE_FILE, *folder.glob("*.index.json")):
            path.unlink()  # they would tell
    run("verify", plain.folder)  # the controls: without an MTP layer, and with one
    run("verify", folder)
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    modules = {name.rpartition(".")[0] for name in tensors}
    for module in sorted(modules):
        kept = {n: t for n, t in tensors.items() if n.rpartition(".")[0] != module}
        save_file(kept, shard)
        sentence = run("verify", folder, code=2).stderr
        named = f"lacks tensors that its config.json calls for (first {module}."
        # What is quantized has a type in a file of its own, which tells too.
        assert named in sentence or f"{module}.weight is missing" in sentence
    embedding = "model.embed_tokens.weight"
    save_file(tensors | {embedding: tensors[embedding][1:].contiguous()}, shard)
    assert f"holds {embedding} with shape [9, 24]" in run("verify", folder, code=2).stderr
