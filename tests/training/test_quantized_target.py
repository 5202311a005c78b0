"""Invariant: a layer is trained on what a quantized target itself writes, as it is served: its
weights decoded, its inputs rounded; and is joined with that very target."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tiny_targets import FAMILIES, write_target
from typer.testing import CliRunner

from sglang_ascend.checkpoint import CheckpointError, validate_checkpoint
from sglang_ascend.cli import app
from sglang_ascend.ptq.quantize import Quantization
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.convert import convert
from sglang_ascend.quantization.recipe import read_recipe
from sglang_ascend.quantization.verification import verify
from sglang_ascend.quantization.writers import make_writer
from sglang_ascend.training.generation.outputs import load_outputs
from sglang_ascend.training.generation.shards import read_shard
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import trained_layer

WORDS = ("--tokens", "200", "--max-length", "64", "--max-new-tokens", "16", "--vocabulary", "0")
WORDS += ("--tokens-per-batch", "200", "--own-share", "0.5", "--threads", "1", "--num-steps", "2")
WORDS += ("--max-steps", "8", "--dtype", "float32")
TOKENS = torch.tensor([[1, 3, 5, 6, 9, 7, 8, 9, 2, 1, 4, 6, 7]])


def quantized(folder: Path, family: str, recipe: str) -> Path:
    source = write_target(folder / "float", family)
    Quantization(source, read_recipe(recipe), folder / recipe).run()
    return folder / recipe


def decoded(folder: Path) -> Path:
    """The float32 checkpoint of the same values."""
    out = folder.with_name(f"{folder.name}-decoded")
    source = Checkpoint.open(folder)
    convert(source, out, make_writer("float32", source.layout))
    return out


def oracle(target: Target, folder: Path, rounds: bool) -> torch.nn.Module:
    """transformers' own model in float64, inputs of every linear of a layer rounded by hooks."""
    kind = getattr(transformers, target.trainable.model_class)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").double()
    model.config._experts_implementation = "eager"
    for name, module in model.named_modules():
        if rounds and isinstance(module, torch.nn.Linear) and ".layers." in name:
            module.register_forward_pre_hook(rounded)
    return model.eval()


def rounded(_: object, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
    step = inputs[0].abs().amax(-1, keepdim=True) / 127
    return ((inputs[0] / step).round() * step,)


def mask(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


@torch.inference_mode()
def test_inputs_are_rounded_as_they_are_served(tmp_path):
    folder = quantized(tmp_path, "MiMoForCausalLM", "w8a8")
    target = Target.open(folder, may_be_quantized=True)
    found = target.load_model(torch.bfloat16)(TOKENS, attention_mask=mask(13)).logits.double()
    exact, floats = (
        oracle(target, decoded(folder) if rounds else tmp_path / "w8a8-decoded", rounds)(TOKENS)
        for rounds in (True, False)
    )
    size = exact.logits.abs().max()
    assert (found - exact.logits).abs().max() < 1e-4 * size
    assert (floats.logits - exact.logits).abs().max() > 1e-3 * size  # the control: inputs in float


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_every_family_s_weights_are_the_decoded_ones(family, tmp_path):
    folder = quantized(tmp_path, family, "w8a16")
    target = Target.open(folder, may_be_quantized=True)
    found = target.load_model()(TOKENS, attention_mask=mask(13)).logits.double()
    expected = oracle(target, decoded(folder), rounds=False)(TOKENS).logits
    floats = oracle(target, tmp_path / "float", rounds=False)(TOKENS).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (floats - expected).abs().max() > 1e-3 * expected.abs().max()  # the control
    for name, tensor in target.read(["model.layers.1.self_attn.o_proj.weight"]).items():
        module = name.removesuffix(".weight")
        assert torch.equal(tensor, Checkpoint.open(folder).weight(module).dequantize())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """A quantized target, and what `train-mtp` made of it."""
    folder = tmp_path_factory.mktemp("quantized")
    target, out = quantized(folder, "MiMoForCausalLM", "w8a8"), folder / "out"
    (folder / "held-out.json").write_text(json.dumps(["a x the ?", "Write a ? x"]))
    words = ["--out", str(out), "--held-out", str(folder / "held-out.json"), *WORDS]
    result = CliRunner().invoke(app, ["train-mtp", str(target), *words])
    assert result.exit_code == 0, result.output
    return target, out


@torch.inference_mode()
def test_the_data_are_the_quantized_model_s_own(trained):
    target, out = trained
    shard = read_shard(next((out / "data").glob("shard-*.safetensors")))
    tokens, hidden = shard["tokens"].long(), shard["hidden"].double()
    length = int(shard["lengths"][0])
    states = {}
    for rounds in (True, False):
        folder = decoded(target) if rounds else target.with_name("w8a8-decoded")
        model = oracle(Target.open(target, may_be_quantized=True), folder, rounds)
        output = model(tokens[None, :length], output_hidden_states=True)
        states[rounds] = output.hidden_states[-1][0, : length - 1]
    errors = {k: (hidden[: length - 1] - v).abs().mean() for k, v in states.items()}
    assert errors[True] < 0.004 * states[True].abs().mean()  # stored in bfloat16
    assert errors[True] < 0.5 * errors[False]  # the control: inputs in float


def test_the_layer_is_joined_with_that_target_and_nothing_else_changed(trained):
    folder, out = trained
    joined, target = Checkpoint.open(out / "model"), Checkpoint.open(folder)
    assert joined.schemes == target.schemes
    for name in target.entries:
        assert torch.equal(joined.tensor(name), target.tensor(name)), name
    opened = Target.open(folder, may_be_quantized=True)
    layer = trained_layer(opened, out / "run").to_checkpoint()
    assert joined.entries.keys() - target.entries.keys() == layer.keys()
    for name, tensor in layer.items():
        assert torch.equal(joined.tensor(name), tensor)
    summary = validate_checkpoint(out / "model")
    assert summary is not None and summary.quantized and summary.num_mtp_tensors == len(layer)
    assert verify(joined).num_hashes > 0
    # Another layer takes the place of the one that is there, also where that one is quantized.
    again = Target.open(out / "model", may_be_quantized=True)
    assert again.mtp_tensors().keys() == layer.keys()


KILLED = """
import os, signal, sys
from sglang_ascend.cli import app
from sglang_ascend.quantization import convert
convert._write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
app(sys.argv[1:])
"""


def test_a_killed_export_leaves_nothing_once_the_command_ran_again(trained, tmp_path):
    """Its unfinished folder has a name of its own, and the size of the target."""
    target, finished = trained
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "model")
    words = ["train-mtp", str(target), "--out", str(out)]
    words += ["--held-out", str(finished.parent / "held-out.json"), *WORDS]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(out.glob(".model.part.*"))) == 1
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert (out / "model" / "config.json").exists() and not list(out.glob(".*"))


@torch.inference_mode()
def test_evaluate_judges_the_quantized_model_s_own_replies(trained):
    target, out = trained
    (out.parent / "prompts.json").write_text(json.dumps([{"domain": "x", "prompt": "a x the ?"}]))
    words = ["--prompts", str(out.parent / "prompts.json"), "--max-new-tokens", "8"]
    words += ["--outputs", str(out.parent / "replies.safetensors"), "--num-steps", "2"]
    result = CliRunner().invoke(
        app, ["train", "evaluate", "--target", str(target), "--run", str(out / "run"), *words]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["all"] or json.loads(result.stdout)["looping outputs"]
    (reply,) = load_outputs(out.parent / "replies.safetensors")
    states = {}
    for rounds in (True, False):
        folder = target.with_name("w8a8-decoded")
        model = oracle(Target.open(target, may_be_quantized=True), folder, rounds)
        states[rounds] = model(reply.tokens[None], output_hidden_states=True).hidden_states[-1][0]
    length = len(reply.tokens) - 1  # the last hidden is not known
    errors = {k: (reply.hidden[:length] - v[:length]).abs().mean() for k, v in states.items()}
    assert errors[True] < 0.004 * states[True].abs().mean()
    assert errors[True] < 0.5 * errors[False]  # the control: inputs in float


def test_what_cannot_compute_or_be_joined_is_refused(trained):
    with pytest.raises(CheckpointError, match="on the CPU only here; pass --device cpu"):
        Target.open(trained[0], may_be_quantized=True, device=torch.device("cuda")).check_whole()
    with pytest.raises(CheckpointError, match="is quantized"):
        Target.open(trained[0])
