"""A quantized checkpoint is complete, of its recipe alone, and the same bytes after any kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import write_target

from sglang_ascend.checkpoint import CheckpointError, validate_checkpoint
from sglang_ascend.ptq.calibration import rounding_errors
from sglang_ascend.ptq.quantize import Quantization
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.layouts.ours import sha256
from sglang_ascend.quantization.qconfig import InputSpec
from sglang_ascend.quantization.recipe import parse_recipe, read_recipe
from sglang_ascend.quantization.verification import verify

TEXTS = 6
GROUPS = """
spec:
  process:
    - type: linear_quant
      qconfig:
        weight: {scope: per_group, dtype: int4, method: minmax, ext: {group_size: 32}}
"""
STATIC = """
spec:
  process:
    - type: linear_quant
      qconfig:
        act: {scope: per_tensor, dtype: int8, symmetric: false}
        weight: {scope: per_channel, dtype: int8}
      include: ["*self_attn.o_proj"]
"""
LIMITED = """
spec:
  process:
    - type: linear_quant
      qconfig:
        act: {scope: per_token, dtype: int8, ext: {max_error: LIMIT}}
        weight: {scope: per_channel, dtype: int8}
      exclude: ["*kv_b_proj"]
"""
FLOAT_PARTS = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "eh_proj", "input_proj", "bias")


def hashes(folder):
    return {path.name: sha256(path) for path in sorted(folder.iterdir())}


def test_every_linear_is_rounded_and_all_else_is_the_source_bit_by_bit(nano, nano_w8a8):
    source, found = load_file(nano / "model.safetensors"), Checkpoint.open(nano_w8a8)
    for name, tensor in source.items():
        module = name.removesuffix(".weight")
        is_float = any(part in name for part in FLOAT_PARTS) or "kv_b_proj" in name
        assert (module in found.schemes) != is_float, name
        if is_float:
            assert torch.equal(found.tensor(name), tensor)
            continue
        values = tensor.double().numpy()
        scale = (np.abs(values).max(1, keepdims=True) / 127).astype(np.float32).astype(np.float64)
        expected = np.round(values / scale) * scale
        error = np.abs(found.weight(module).dequantize().numpy() - expected).max()
        assert error < 1e-5, name
        wrong = np.abs(found.weight(module).rows(0, 4).dequantize().numpy() - expected[4:8]).max()
        assert wrong > 1e-3, name  # the control: other rows
    assert any(module.startswith("model.layers.4.") for module in found.schemes)  # the MTP layer
    summary = validate_checkpoint(nano_w8a8)
    assert summary is not None and summary.quantized


def test_a_tied_head_becomes_a_tensor_of_its_own(tmp_path):
    source = write_target(tmp_path / "tied", "MiMoForCausalLM")
    Quantization(source, read_recipe("w8a8-head"), tmp_path / "out").run()
    found = Checkpoint.open(tmp_path / "out")
    embedding = Checkpoint.open(source).tensor("model.embed_tokens.weight")
    assert torch.equal(found.tensor("model.embed_tokens.weight"), embedding)
    head = found.weight("lm_head")
    values, floats = head.dequantize(), embedding.float()
    assert ((values - floats).abs() <= 0.5001 * head.scale).all()
    assert ((values.roll(1, 0) - floats).abs() > head.scale).any()  # the control: other rows
    assert not found.config.flag("tie_word_embeddings")


def test_fp8_is_written_as_deepseek_does(nano, tmp_path):
    Quantization(nano, read_recipe("fp8"), tmp_path / "out").run()
    found = Checkpoint.open(tmp_path / "out")
    assert found.layout.name == "fp8"
    weight = found.weight("model.layers.0.mlp.down_proj")
    assert weight.block == (128, 128) and list(weight.scale.shape) == [2, 5]
    source = load_file(nano / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].float()
    assert ((weight.dequantize() - source).abs() <= source.abs() / 16 + 1e-3).all()


def test_groups_that_do_not_divide_are_int8_per_channel_and_said_to_be(nano, tmp_path):
    summary = Quantization(nano, parse_recipe(GROUPS, "groups"), tmp_path / "out").run()
    kinds = {"kv_b_proj", "o_proj"}  # 88 and 240 columns
    assert {name.split(".")[-1] for name in summary.fallbacks} == kinds
    assert len(summary.fallbacks) == 2 * 5
    found = Checkpoint.open(tmp_path / "out")
    assert found.layout.name == "compressed-tensors"
    for module in found.schemes:
        weight = found.weight(module)
        is_fallback = module in summary.fallbacks
        assert int(weight.codes.abs().max()) == (127 if is_fallback else 7)
        assert weight.scale.shape[1] == (1 if is_fallback else weight.shape[1] // 32)


FEW_BITS = """
spec:
  process:
    - type: linear_quant
      qconfig: {weight: {scope: per_channel, dtype: DTYPE, method: METHOD, symmetric: false}}
      include: ["model.layers.*.mlp.shared_experts.*"]
    - type: linear_quant
      qconfig: {weight: {scope: per_channel, dtype: int8}}
      include: ["lm_head"]
"""


def test_weight_only_integers_take_their_bits(nano, tmp_path):
    """Beside a byte for each code in ModelSlim's files, for int3 and HQQ's real zero points."""
    held, sizes = {}, {}
    for dtype, method in (("int4", "mse"), ("int2", "mse"), ("int2", "hqq"), ("int3", "mse")):
        name, out = f"{dtype} {method}", tmp_path / dtype / method
        text = FEW_BITS.replace("DTYPE", dtype).replace("METHOD", method)
        Quantization(nano, parse_recipe(text, name), out).run()
        found = held[name] = Checkpoint.open(out)
        assert verify(found).num_hashes > 0
        codes = [found.entries[n] for m in found.schemes for n in found.names_of(m)]
        sizes[name] = sum(
            e.num_bytes for e in codes if "experts" in e.name and "scale" not in e.name
        )
    layouts = {name: found.layout.name for name, found in held.items()}
    packed, wide = "compressed-tensors", "sglang-ascend"
    assert layouts == {"int4 mse": packed, "int2 mse": packed, "int2 hqq": wide, "int3 mse": wide}
    assert sizes["int2 mse"] < 0.6 * sizes["int4 mse"] < 0.36 * sizes["int3 mse"]
    module = "model.layers.1.mlp.shared_experts.up_proj"
    floats_of_nano = Checkpoint.open(nano).tensor(f"{module}.weight")
    for name, bits in (("int4 mse", 4), ("int2 mse", 2)):
        weight = held[name].weight(module)
        assert weight.zero is not None and weight.number_format.bits == bits
        values, floats = weight.dequantize(), floats_of_nano.float()
        clipped = floats.clamp(values.amin(1, keepdim=True), values.amax(1, keepdim=True))
        assert ((values - clipped).abs() <= 0.5001 * weight.scale).all()
        assert ((values.roll(1, 1) - clipped).abs() > weight.scale).any()  # the control


def test_inputs_stay_float_where_int8_costs_too_much_and_fused_linears_are_of_one_kind(
    nano, nano_w8a8, tmp_path
):
    """Only the input's rule differs from w8a8's; with a larger limit every input is int8."""
    plain = Checkpoint.open(nano_w8a8)
    kinds = {}
    for limit in (0.0003, 1.0):
        recipe = parse_recipe(LIMITED.replace("LIMIT", str(limit)), "limited")
        task = Quantization(nano, recipe, tmp_path / str(limit), num_texts=2)
        summary, found = task.run(), Checkpoint.open(tmp_path / str(limit))
        assert found.schemes.keys() == plain.schemes.keys()
        kinds[limit] = {name: scheme.input_rule.kind for name, scheme in found.schemes.items()}
        named = {name for name, kind in kinds[limit].items() if kind == "none"}
        assert set(summary.float_inputs) == named
        assert summary.schemes.get("W8A16", 0) == len(named)
        assert sum(summary.schemes.values()) == len(found.schemes)
        assert task.run().already_done and task.run().schemes == summary.schemes
        some = sorted(named)[:3] or sorted(found.schemes)[:3]
        for name in some:
            assert torch.equal(found.weight(name).codes, plain.weight(name).codes)
    assert set(kinds[1.0].values()) == {"per_token"}  # the control
    assert set(kinds[0.0003].values()) == {"per_token", "none"}
    for layer in range(5):
        prefix = f"model.layers.{layer}."
        for fused in (
            ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
            ("mlp.gate_proj", "mlp.up_proj"),
            ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            [f"mlp.experts.{n}.{part}_proj" for n in range(8) for part in ("gate", "up")],
            [f"mlp.experts.{n}.down_proj" for n in range(8)],
        ):
            names = [prefix + name for name in fused if prefix + name in plain.schemes]
            assert len({kinds[0.0003][name] for name in names}) <= 1, names


@torch.inference_mode()
def test_a_rounding_error_is_the_share_of_the_outputs_that_moved():
    """In float64 NumPy, with an outlier that takes all but a few codes of one row."""
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(64, 32, bias=True)
    seen = torch.randn(5, 64, generator=generator)
    seen[2, 7] = 1000.0
    x, w = seen.double().numpy(), linear.weight.double().numpy()
    scale = np.abs(x).max(1, keepdims=True) / 127
    moved = (np.round(x / scale) * scale - x) @ w.T
    expected = (moved**2).sum(1) / ((x @ w.T) ** 2).sum(1)
    spec = InputSpec(scope="per_token", dtype="int8")
    found = rounding_errors(linear, seen, spec).numpy()
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    linear.weight[:, 7] = 0  # the outlier itself is no part of the outputs: only its harm is
    assert rounding_errors(linear, seen, spec)[2] > 0.5 > 0.01 > found[0]


def test_a_static_scale_spans_what_calibration_saw(with_mtp, tmp_path):
    """Every family, its random words as calibration text; the offset uses all 256 codes."""
    Quantization(with_mtp, parse_recipe(STATIC, "static"), tmp_path / "out", num_texts=4).run()
    found = Checkpoint.open(tmp_path / "out")
    assert len(found.schemes) == 3  # two layers and the MTP layer
    for module in found.schemes:
        rule = found.weight(module).input_rule
        assert rule.scale is not None and rule.offset is not None
        low, high = (rule.scale * (code - rule.offset) for code in (-128, 127))
        assert low < 0 < high
        assert 0.1 < high - low < 100


def test_a_killed_run_goes_on_and_gives_the_bytes_of_one_that_was_not(nano, tmp_path):
    code = (
        "import sys; from sglang_ascend.cli import app; "
        "sys.argv = ['sglang-ascend', *sys.argv[1:]]; app()"
    )
    out, partial = tmp_path / "killed", tmp_path / "killed.partial"
    options = [f"--calibration-texts={TEXTS}", "--recipe=w4a8", f"--out={out}"]
    command = [sys.executable, "-c", code, "quantize", str(nano), *options]
    process = subprocess.Popen(command, env=os.environ, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (partial / "layer-00001.safetensors").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    kept = {path: path.stat().st_mtime_ns for path in partial.glob("layer-*")}
    assert kept

    finished = []
    resumed = Quantization(nano, read_recipe("w4a8"), out, num_texts=TEXTS)
    resumed.run(lambda name: finished.append(name))
    assert len(finished) == resumed.num_parts + 1 - len(kept)
    whole = tmp_path / "whole"
    Quantization(nano, read_recipe("w4a8"), whole, num_texts=TEXTS).run()
    assert hashes(out) == hashes(whole)
    other = tmp_path / "other"  # the control: another seed's text gives other codes
    Quantization(nano, read_recipe("w4a8"), other, seed=1, num_texts=TEXTS).run()
    assert hashes(other) != hashes(whole)
    assert not partial.exists()


def test_the_same_command_again_does_nothing_and_another_recipe_is_refused(nano, nano_w8a8):
    before = {path: path.stat().st_mtime_ns for path in nano_w8a8.iterdir()}
    assert Quantization(nano, read_recipe("w8a8"), nano_w8a8).run().already_done
    with pytest.raises(CheckpointError, match="is not what this recipe and seed make"):
        Quantization(nano, read_recipe("w8a16"), nano_w8a8).run()
    assert {path: path.stat().st_mtime_ns for path in nano_w8a8.iterdir()} == before


def test_the_same_command_for_another_model_is_refused(nano, nano_w8a8, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(nano, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"].neg_()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match="is not what this recipe and seed make of this model"
    ):
        Quantization(other, read_recipe("w8a8"), nano_w8a8).run()


def test_a_value_that_is_not_finite_is_refused_by_name(nano, tmp_path):
    folder = tmp_path / "nan"
    shutil.copytree(nano, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight"):
        Quantization(folder, read_recipe("w8a8"), tmp_path / "out").run()
    assert not (tmp_path / "out").exists()


def test_a_run_killed_behind_its_last_step_is_done_and_leaves_nothing(nano, tmp_path):
    """By every layout: FP8's files are not ModelSlim's."""
    out = tmp_path / "out"
    Quantization(nano, read_recipe("fp8"), out).run()
    (tmp_path / "out.partial").mkdir()
    assert Quantization(nano, read_recipe("fp8"), out).run().already_done
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_unfinished_layers_of_another_recipe_are_refused_and_kept(nano, tmp_path):
    class Killed(Exception):
        pass

    def kill(name):
        raise Killed

    out = tmp_path / "out"
    with pytest.raises(Killed):
        Quantization(nano, read_recipe("w8a8"), out).run(kill)
    kept = hashes(tmp_path / "out.partial")
    with pytest.raises(CheckpointError, match="unfinished layers of another recipe"):
        Quantization(nano, read_recipe("w8a16"), out).run()
    assert hashes(tmp_path / "out.partial") == kept and not out.exists()


UNWRITABLE = {
    "fp8 per channel": ({"dtype": "fp8_e4m3", "scope": "per_channel"}, None),
    "fp8 blocks of float inputs": ({"dtype": "fp8_e4m3", "scope": "per_block"}, None),
    "static inputs of int4": (
        {"dtype": "int4", "scope": "per_group"},
        {"dtype": "int8", "scope": "per_tensor"},
    ),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_a_recipe_that_no_file_can_hold_is_refused_before_anything_is_solved(nano, tmp_path, name):
    weight, act = UNWRITABLE[name]
    qconfig = {"weight": weight} | ({"act": act} if act else {})
    process = [{"type": "linear_quant", "qconfig": qconfig}]
    recipe = parse_recipe(json.dumps({"spec": {"process": process}}), name)
    with pytest.raises(CheckpointError, match="give it another scheme in the recipe"):
        Quantization(nano, recipe, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_run_killed_as_it_began_is_begun_again(nano, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "task.json.part").write_text("{")
    assert not Quantization(nano, read_recipe("w8a8"), tmp_path / "out").run().already_done


def test_folders_that_are_not_its_own_are_left_alone(nano, tmp_path):
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "mine.partial" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="is not an unfinished quantization"):
        Quantization(nano, read_recipe("w8a8"), tmp_path / "mine").run()
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="name a new folder or move it away"):
        Quantization(nano, read_recipe("w8a8"), tmp_path / "out").run()


def test_sources_that_cannot_be_quantized_are_refused(nano, nano_w8a8, tmp_path):
    with pytest.raises(CheckpointError, match="is quantized; pass the checkpoint that it was made"):
        Quantization(nano_w8a8, read_recipe("w8a8"), tmp_path / "out")
    with pytest.raises(CheckpointError, match="matches no linear"):
        nothing = GROUPS.replace("      qconfig:", "      include: ['*.q_prj']\n      qconfig:")
        Quantization(nano, parse_recipe(nothing, "nothing"), tmp_path / "out")
