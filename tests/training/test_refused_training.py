"""Invariant: what `sglang-ascend train …` cannot do, or would do wrongly, is one sentence."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_targets import write_target
from train_runs import STEPS, run_recipe, train
from typer.testing import CliRunner

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.cli import app
from sglang_ascend.files import alone_in
from sglang_ascend.quantization.writers import saving
from sglang_ascend.training.generation.shards import read_metadata
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.layer import MTPLayer
from sglang_ascend.training.targets.start import new_layer, own_layer


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("generate --data D --exclude P --tokens 9 --prompts BAD", "row 1 is none of a string"),
        ("generate --data D --exclude BAD --tokens 9", "row 1 is none of a string"),
        ("text --data D --text MISSING --tokens 9", "MISSING"),
        ("train --data MISSING --out D", "MISSING holds no shard: run `generate` first"),
        ("generate --data D --exclude P --tokens 9 --dtype fp16", "--dtype 'fp16' is none of"),
        ("train --data MISSING --out D --loss mse", "--loss mse is none of ce, kl"),
        ("evaluate --prompts MISSING --outputs D --run RUN", "RUN holds no checkpoint"),
        ("evaluate --prompts P --outputs D", "has no MTP layer; train one, and name what `train`"),
        ("vocabulary --data MISSING --out D", "MISSING holds no shard: run `generate` first"),
        ("export --run RUN D", "RUN holds no checkpoint.safetensors: run `train` first"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(command, sentence, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "BAD").write_text("[3]")
    (tmp_path / "P").write_text('["Write the x ?"]')
    target = write_target(tmp_path / "target", "MiMoForCausalLM")
    name, *words = command.split()
    result = CliRunner().invoke(app, ["train", name, "--target", str(target), *words])
    assert result.exit_code == 2, result.exception
    assert result.stderr.startswith("sglang-ascend: ")
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr
    missing = CliRunner().invoke(app, ["train", name, "--target", "NONE", *words])
    assert (missing.exit_code, missing.stderr.count("\n")) == (2, 1)


def test_two_commands_do_not_write_the_same_files(tmp_path: Path) -> None:
    """Two of one seed write shards of the same names, each over the other's."""
    target, data = write_target(tmp_path / "target", "MiMoForCausalLM"), tmp_path / "data"
    (tmp_path / "P").write_text('["Write the x ?"]')
    generate = ("generate", "--data", data, "--exclude", tmp_path / "P", "--tokens", 9)
    train(*generate, "--target", target)
    (tmp_path / "text.txt").write_text("Write the user a x ? " * 8)
    text = ("text", "--data", data, "--text", tmp_path / "text.txt", "--tokens", 9)
    fit = ("train", "--data", data, "--out", tmp_path / "run", "--max-steps", 1)
    with alone_in(data, "lock-000"), alone_in(data, "lock-text"), alone_in(tmp_path / "run"):
        for words, option in ((generate, "--seed"), (text, "--data"), (fit, "--out")):
            result = CliRunner().invoke(app, ["train", *map(str, (*words, "--target", target))])
            assert result.exit_code == 2
            assert f": wait for it, or name another {option}." in result.stderr
        train(*generate, "--target", target, "--seed", 1)
    assert {path.name for path in data.glob("*.safetensors")} == {
        "shard-000-00000.safetensors",
        "shard-001-00000.safetensors",
    }


def test_what_another_target_wrote_is_named(tmp_path: Path) -> None:
    """Shards before a new layer starts from them, and the layer that training would go on with."""
    target = write_target(tmp_path / "target", "MiMoForCausalLM")
    wide = write_target(tmp_path / "wide", "MiMoForCausalLM", hidden_size=48)
    run_recipe(target, tmp_path, 100, 4)
    for path in (tmp_path / "data").glob("*.safetensors"):  # as those that name no target
        metadata = read_metadata(path)
        save_file(load_file(path), path, {n: v for n, v in metadata.items() if n != "target"})
    for run, sentence in (
        ("new", "holds hidden states of 24 values and not of 48: another target wrote it"),
        ("run", "is of a layer of another model: name another --out"),
    ):
        words = ("--target", wide, "--data", tmp_path / "data", "--out", tmp_path / run)
        result = CliRunner().invoke(app, ["train", "train", *map(str, words)])
        assert result.exit_code == 2, result.exception
        assert sentence in result.stderr


def test_shards_of_another_target_of_the_same_sizes_are_refused(tmp_path: Path) -> None:
    """A layer would learn to draft for that one, and nothing would say so."""
    target = write_target(tmp_path / "target", "LlamaForCausalLM")
    other = write_target(tmp_path / "other", "LlamaForCausalLM", initializer_range=0.4)
    out = run_recipe(target, tmp_path, 100, 4)
    for name, words in (
        ("generate", ("--exclude", tmp_path / "held_out.json", "--tokens", 200)),
        ("text", ("--text", tmp_path / "text.txt", "--tokens", 9_999)),
        ("train", ("--out", tmp_path / "again", "--max-steps", 1)),
    ):
        words = (name, "--data", tmp_path / "data", *words)
        result = CliRunner().invoke(app, ["train", *map(str, words), "--target", str(other)])
        assert result.exit_code == 2, result.output
        assert f"was written by another target than {other}: name that one as" in result.stderr
        train(*words, "--target", out)  # the control: the same weights, and an MTP layer


def test_a_layer_that_was_trained_for_another_target_of_the_same_sizes_is_refused(
    tmp_path: Path,
) -> None:
    """Its drafts would be wrong, and nothing would say so."""
    target = write_target(tmp_path / "target", "LlamaForCausalLM")
    other = write_target(tmp_path / "other", "LlamaForCausalLM", initializer_range=0.4)
    out, run, held_out = (
        run_recipe(target, tmp_path, 100, 4),
        tmp_path / "run",
        tmp_path / "held_out.json",
    )
    own = ("--exclude", held_out, "--tokens", 60, "--rows", 4, "--shard", 4)
    train("generate", "--target", other, "--data", tmp_path / "own", *own)
    evaluated = ("--prompts", held_out, "--outputs", tmp_path / "replies.safetensors")
    for words, sentence in (
        (("export", "--run", run, tmp_path / "new"), f"{run} holds no layer for {other}"),
        (("evaluate", "--run", run, *evaluated), f"{run} holds no layer for {other}"),
        (
            ("train", "--data", tmp_path / "own", "--out", run, "--max-steps", STEPS + 1),
            f"{run / 'checkpoint.safetensors'} is of a layer of another model",
        ),
    ):
        result = CliRunner().invoke(app, ["train", *map(str, words), "--target", str(other)])
        assert result.exit_code == 2, result.output
        assert sentence in result.stderr
    assert not (tmp_path / "new").exists()
    # The control: the target itself, also with its layer joined.
    for name, folder in (("again", target), ("joined", out)):
        train("export", "--target", folder, "--run", run, tmp_path / name)


def test_provenance_names_the_file_that_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    bad, listed = tmp_path / "bad.json", tmp_path / "list.json"
    for words, sentence in (
        (("--facts", bad), f"{bad} is not valid JSON"),
        (("--facts", listed), f"{listed} does not hold a JSON object"),
        (("--add", f"figures={bad}"), f"{bad} is not JSON"),
        (("--add", "figures"), "--add figures names no file: write NAME=FILE.json"),
    ):
        command = ("provenance", "--data", tmp_path, "--run", tmp_path, *words, tmp_path / "out")
        result = CliRunner().invoke(app, ["train", *map(str, command)])
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert sentence in result.stderr


def test_a_part_of_a_layer_is_no_layer_to_go_on_from(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "DeepseekV3ForCausalLM")
    layer = new_layer(Target.open(target), seed=1).to_checkpoint()
    (*_, lost) = sorted(layer)
    weights = load_file(target / "model.safetensors")
    save_file(weights | {n: w for n, w in layer.items() if n != lost}, target / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"lacks {lost} \(1 tensors of its MTP layer"):
        own_layer(Target.open(target))
    run_recipe(target, tmp_path, 200, 4, "--from-scratch")


def test_weights_that_are_not_finite_are_not_exported(tiny_target) -> None:
    layer = MTPLayer(tiny_target("MiMoForCausalLM"))
    layer.initialize(torch.ones(24), 0.3, torch.Generator())
    with torch.no_grad():
        layer.projection.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        layer.to_checkpoint()


def test_a_family_that_cannot_be_trained_is_refused_in_one_sentence(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "MiMoForCausalLM")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(CheckpointError, match=r"GPT2LMHeadModel, whose MTP layer cannot be train"):
        Target.open(target)


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path, monkeypatch) -> None:
    target = write_target(tmp_path / "target", "MiMoForCausalLM")
    run_recipe(target, tmp_path, 100, 4)
    data, run = ("--data", tmp_path / "data"), tmp_path / "run"
    train("vocabulary", "--target", target, *data, "--out", tmp_path / "new", "--size", 8)
    held_out = tmp_path / "held_out.json"

    def full(tensors, path, metadata=None):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_file", full)
        more = ("--exclude", held_out, "--tokens", 300, "--data", tmp_path / "more")
        for words, name in (
            (("generate", *more), "more/shard-000-00000.safetensors"),
            (("export", "--run", run, tmp_path / "mtp.safetensors"), "mtp.safetensors"),
            (("export", "--run", run, tmp_path / "full"), ".full.unfinished/full/model.safe"),
        ):
            result = CliRunner().invoke(app, ["train", *map(str, words), "--target", str(target)])
            assert result.exit_code == 2, result.output
            assert f"{tmp_path / name}" in result.stderr and "free space" in result.stderr
    small = write_target(tmp_path / "small", "MiMoForCausalLM", vocab_size=6)
    for words, said in (
        (
            ("evaluate", "--target", target, "--run", run, "--prompts", held_out, "--outputs", run),
            f"--outputs {run} is a folder: name a file in it",
        ),
        (
            ("vocabulary", "--target", small, *data, "--out", tmp_path / "new"),
            "shard-000-00000.safetensors has tokens beyond the 6 of this vocabulary",
        ),
    ):
        result = CliRunner().invoke(app, ["train", *map(str, words)])
        assert result.exit_code == 2, result.output
        assert said in result.stderr
    path = run / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    outputs = ("--prompts", held_out, "--outputs", tmp_path / "replies.safetensors")
    of_target = ("--target", target)
    for words in (
        ("train", *of_target, *data, "--out", run),
        ("evaluate", *of_target, "--run", run, *outputs),
        ("export", *of_target, "--run", run, tmp_path / "other"),
        ("provenance", *data, "--run", run, tmp_path / "provenance.json"),
    ):
        result = CliRunner().invoke(app, ["train", *map(str, words)])
        assert result.exit_code == 2, result.output
        assert f"{path} is damaged" in result.stderr and "delete it" in result.stderr


def test_a_config_of_which_transformers_makes_no_model_is_refused(tmp_path: Path) -> None:
    """By whatever exception each of its classes has for it."""
    folder = write_target(tmp_path / "target", "MiMoForCausalLM")
    (tmp_path / "P").write_text('["Write the x ?"]')
    generate = ("train", "generate", "--data", tmp_path / "data", "--exclude", tmp_path / "P")
    commands = (
        (*generate, "--tokens", 9, "--shard", 4, "--target"),
        ("quantize", "--recipe", "w8a8", "--out", tmp_path / "out"),
    )
    for words in commands:  # the control
        assert CliRunner().invoke(app, [*map(str, words), str(folder)]).exit_code == 0
    shutil.rmtree(tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    for change in (
        {"layer_types": ["full_attention"]},
        {"rope_scaling": {"type": "x"}, "rope_parameters": None},
        {"hidden_act": "gelu_x"},
        {"pad_token_id": 99},
        {"dtype": "float99"},
        {"rms_norm_eps": None},
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        for words in commands:
            result = CliRunner().invoke(app, [*map(str, words), str(folder)])
            assert result.exit_code == 2, (change, result.exception)
            (line,) = [row for row in result.stderr.splitlines() if "sglang-ascend: " in row]
            assert f"{folder / 'config.json'} makes no Qwen2ForCausalLM of transformers" in line
