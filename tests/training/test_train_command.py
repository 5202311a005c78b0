"""Invariant: the same commands take a checkpoint of any family to a folder that SGLang serves."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_targets import FAMILIES, write_target
from typer.testing import CliRunner

from sglang_ascend.checkpoint import CheckpointError, validate_checkpoint
from sglang_ascend.checkpoint.shards import INDEX_NAME
from sglang_ascend.cli import app
from sglang_ascend.files import alone_in
from sglang_ascend.models.nano_deepseek import ARTIFACT
from sglang_ascend.quantization.writers import saving
from sglang_ascend.training.generation.conversation import FORCED, REPLY, USER
from sglang_ascend.training.generation.shards import read_metadata, read_prompt_list, read_shard
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.layer import MTPLayer
from sglang_ascend.training.targets.start import new_layer, own_layer, trained_layer

STEPS = 4
KILLED = """
import os, signal, sys
from sglang_ascend.cli import app
from sglang_ascend.training import export
export.let_others_read = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
app(sys.argv[1:])
"""


def train(*arguments: object) -> str:
    """Runs `sglang-ascend train …`; returns what it printed on stdout."""
    result = CliRunner().invoke(app, ["train", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_recipe(target: Path, work: Path, tokens: int, rows: int, *options: str) -> Path:
    """generate, train, export; returns the exported folder."""
    (work / "held_out.json").write_text('[{"domain": "any", "prompt": "Write the x ?"}]')
    data, run, out = work / "data", work / "run", work / "out"
    train(
        *("generate", "--target", target, "--data", data, "--exclude", work / "held_out.json"),
        *("--tokens", tokens, "--rows", rows, "--shard", 4),
    )
    (work / "text.txt").write_text("Write the user a x ? " * 8)
    train("text", "--target", target, "--data", data, "--text", work / "text.txt", "--tokens", 30)
    assert (data / "text-00000.safetensors").exists()
    train(
        *("train", "--target", target, "--data", data, "--out", run, "--max-steps", STEPS),
        *("--tokens-per-batch", 600, *options),
    )
    train("export", "--target", target, "--run", run, out)
    return out


def test_user_turns_are_the_templates_unless_the_target_writes_some(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "MiMoForCausalLM")
    (tmp_path / "held_out.json").write_text('["Write the x ?"]')
    for share, written_first in ((0, REPLY), (1, USER)):
        data = tmp_path / str(share)
        train(
            *("generate", "--target", target, "--data", data, "--own-share", share),
            *("--exclude", tmp_path / "held_out.json", "--tokens", 60, "--rows", 4, "--shard", 4),
        )
        shard = read_shard(data / "shard-000-00000.safetensors")
        conversations = shard["roles"].split(shard["lengths"].tolist())
        assert {int(roles[roles != FORCED][0]) for roles in conversations} == {written_first}


def test_prompts_of_a_file_are_what_is_generated_on(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "MiMoForCausalLM")
    (tmp_path / "held_out.json").write_text('["Write the x ?"]')
    mine = ["Write a x ?", "Write the user a x", "Write a ? x"]  # of one key, two of them
    (tmp_path / "mine.json").write_text(json.dumps([*mine, "Write the x ?"]))
    train(
        *("generate", "--target", target, "--data", tmp_path / "data", "--tokens", 9_999),
        *("--exclude", tmp_path / "held_out.json", "--prompts", tmp_path / "mine.json"),
    )
    (shard,) = (tmp_path / "data").glob("*.safetensors")
    assert {*read_prompt_list(shard)} == {*mine}
    more = [*mine, "Write the the a ?"]
    (tmp_path / "mine.json").write_text(json.dumps(more))
    train(
        *("generate", "--target", target, "--data", tmp_path / "data", "--tokens", 9_999),
        *("--exclude", tmp_path / "held_out.json", "--prompts", tmp_path / "mine.json"),
        *("--seed", 1),
    )
    (shard,) = (tmp_path / "data").glob("shard-001-*.safetensors")
    assert read_prompt_list(shard) == more[3:]  # no seed answers a prompt again
    words = ("generate", "--target", target, "--data", tmp_path / "data", "--tokens", 9_999)
    words += ("--exclude", tmp_path / "held_out.json", "--prompts", tmp_path / "mine.json")
    result = CliRunner().invoke(app, ["train", *map(str, words), "--seed", "2"])
    assert "--prompts gave 0 of 9,999 tokens" in result.stderr


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


def check_exported(target: Path, out: Path, run: Path) -> None:
    """The folder can be served, holds the trained layer, and the target's weights unchanged."""
    opened, exported = Target.open(target), Target.open(out)
    summary = validate_checkpoint(out)
    assert summary is not None
    assert summary.architecture == opened.family.architecture
    assert summary.num_mtp_tensors == len(exported.mtp_tensors()) > 0
    wanted = trained_layer(opened, run).to_checkpoint()
    held = exported.mtp_tensors()
    assert all(torch.equal(held[name], wanted[name].float()) for name in wanted)
    own = [name for name in opened.tensors if not name.startswith(opened.mtp_prefix)]
    before, after = opened.read(own), exported.read(own)
    assert all(torch.equal(before[name], after[name]) for name in own)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_without_an_mtp_layer_gets_one(family: str, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", family)
    with pytest.raises(CheckpointError):
        validate_checkpoint(target)
    out = run_recipe(target, tmp_path, 300, 4)
    check_exported(target, out, tmp_path / "run")
    log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("names", [["model-00001-of-00001"], ["b", "a"]])
def test_a_target_without_an_index_is_read_as_sglang_reads_it(names, tmp_path: Path) -> None:
    """Every safetensors file, whatever its name; transformers would look for model.safetensors."""
    target = write_target(tmp_path / "target", "LlamaForCausalLM")
    weights = load_file(target / "model.safetensors")
    wanted = Target.open(target).load_model().state_dict()
    (target / "model.safetensors").unlink()
    for place, name in enumerate(names):
        part = {key: weights[key] for key in sorted(weights)[place :: len(names)]}
        save_file(part, target / f"{name}.safetensors", metadata={"format": "pt"})
    found = Target.open(target).load_model().state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    check_exported(target, run_recipe(target, tmp_path, 200, 4), tmp_path / "run")


def test_a_plain_qwen2_is_served_as_mimo_once_it_has_a_layer(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "MiMoForCausalLM")
    config = json.loads((target / "config.json").read_text())
    config["architectures"] = ["Qwen2ForCausalLM"]
    (target / "config.json").write_text(json.dumps(config))
    out = run_recipe(target, tmp_path, 200, 4)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["MiMoForCausalLM"]
    validate_checkpoint(out)


def test_nano_deepseek_goes_on_from_its_own_layer(tmp_path: Path) -> None:
    """And, asked to, from a new one: another layer results, from the same data and steps."""
    out = run_recipe(ARTIFACT, tmp_path, 600, 8, "--learning-rate", "0", "--muon-rate", "0")
    check_exported(ARTIFACT, out, tmp_path / "run")
    # A rate of zero leaves the layer as it was; what was trained on is its own text.
    before, after = Target.open(ARTIFACT).mtp_tensors(), Target.open(out).mtp_tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)
    scratch = tmp_path / "scratch"
    common = ("--target", ARTIFACT, "--data", tmp_path / "data")
    train("train", *common, "--out", scratch, "--max-steps", 1, "--from-scratch")
    layer = trained_layer(Target.open(ARTIFACT), scratch).to_checkpoint()
    assert not any(torch.equal(before[n], layer[n].float()) for n in before if "proj" in n)


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


def test_a_killed_export_leaves_no_folder_of_its_name(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "MiMoForCausalLM")
    run_recipe(target, tmp_path, 100, 4)
    words = ["train", "export", "--target", target, "--run", tmp_path / "run", tmp_path / "new"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert list((tmp_path / ".new.unfinished" / "new").iterdir())
    assert not (tmp_path / "new").exists()
    train(*words[1:])
    validate_checkpoint(tmp_path / "new")
    assert not list(tmp_path.glob(".new*"))


def test_two_runs_become_the_mean_of_their_weights(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "MiMoForCausalLM")
    run_recipe(target, tmp_path, 200, 4)
    runs = tmp_path / "run", tmp_path / "other"
    common = ("--data", tmp_path / "data", "--max-steps", STEPS, "--muon-rate", 0.2, "--seed", 1)
    train("train", "--target", target, "--out", runs[1], *common)
    train("export", "--target", target, "--run", runs[0], "--run", runs[1], tmp_path / "mean")
    first, second = (trained_layer(Target.open(target), run).to_checkpoint() for run in runs)
    for name, mean in Target.open(tmp_path / "mean").mtp_tensors().items():
        a, b = first[name].double(), second[name].double()
        rounding = torch.maximum(a.abs(), b.abs()) * 2**-7  # bf16 twice
        assert ((mean.double() - (a + b) / 2).abs() <= rounding).all(), name
    differs = (first[n].ne(second[n]).float().mean() for n in first if "proj" in n)
    assert min(differs) > 0.9  # the control: the mean is neither of them
    another = write_target(tmp_path / "another", "DeepseekV3ForCausalLM")
    with pytest.raises(ValueError, match=f"{runs[0]} holds no layer for {another}: name its own"):
        trained_layer(Target.open(another), *runs)


def test_evaluate_and_provenance_describe_the_exported_folder(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "DeepseekV3ForCausalLM")
    out = run_recipe(target, tmp_path, 200, 4)
    prompts = ("--prompts", tmp_path / "held_out.json", "--max-new-tokens", 40)
    outputs = ("--outputs", tmp_path / "outputs.safetensors")
    by_run = train("evaluate", "--target", target, "--run", tmp_path / "run", *prompts, *outputs)
    by_folder = train("evaluate", "--target", out, *prompts, *outputs)
    assert json.loads(by_run) == json.loads(by_folder)
    other = shutil.copytree(out, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    prompts_file = tmp_path / "others.json"
    prompts_file.write_text('["Write a x ?"]')
    for name, changed in (
        ("--target", ("--target", other, *prompts)),
        ("--prompts", ("--target", out, "--prompts", prompts_file, *prompts[2:])),
        ("--max-new-tokens", ("--target", out, *prompts[:2], "--max-new-tokens", 41)),
    ):
        result = CliRunner().invoke(app, ["train", "evaluate", *map(str, (*changed, *outputs))])
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"replies that were written with another {name}: name another" in result.stderr
    (tmp_path / "facts.json").write_text('{"licence": "Apache-2.0"}')
    (tmp_path / "figures.json").write_text(by_folder)
    train(
        *("provenance", "--data", tmp_path / "data", "--run", tmp_path / "run"),
        *("--facts", tmp_path / "facts.json", "--add", f"acceptance={tmp_path / 'figures.json'}"),
        tmp_path / "provenance.json",
    )
    record = json.loads((tmp_path / "provenance.json").read_text())
    assert record["licence"] == "Apache-2.0"
    assert record["acceptance"] == json.loads(by_folder)
    assert record["data"]["sampled_tokens"] >= 200
    assert record["settings"]["training"]["max_steps"] == record["training"]["steps"] == STEPS


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


def shards_of(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes `tensors` as two shards with an index, in place of the folder's weights."""
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + (i % 2)}.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        held = {name: tensors[name] for name in names if weight_map[name] == shard}
        save_file(held, folder / shard)
    (folder / "model.safetensors").unlink()
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_layer_in_two_shards_is_replaced_whole(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "DeepseekV3ForCausalLM")
    first = new_layer(Target.open(target), seed=1).to_checkpoint()
    shards_of(target, load_file(target / "model.safetensors") | first)
    out = run_recipe(target, tmp_path, 200, 4)
    check_exported(target, out, tmp_path / "run")
    assert {path.name for path in out.glob("*.safetensors")} == {
        "model-1.safetensors",
        "model-2.safetensors",
    }


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


def test_an_exported_layer_file_is_the_folders_layer(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "MiMoForCausalLM")
    out = run_recipe(target, tmp_path, 200, 4)
    train(
        "export",
        "--target",
        target,
        "--run",
        tmp_path / "run",
        tmp_path / "new" / "mtp.safetensors",
    )
    tensors = load_file(tmp_path / "new" / "mtp.safetensors")
    held = own_layer(Target.open(out)).to_checkpoint()
    assert tensors.keys() == held.keys()
    assert all(torch.equal(tensors[name], held[name]) for name in held)
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())


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


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention"]},
        {"rope_scaling": {"type": "x"}, "rope_parameters": None},
        {"hidden_act": "gelu_x"},
        {"pad_token_id": 99},
        {"dtype": "float99"},
        {"rms_norm_eps": None},
    ],
)
def test_a_config_of_which_transformers_makes_no_model_is_refused(change, tmp_path: Path) -> None:
    """By whatever exception each of its classes has for it."""
    folder = write_target(tmp_path / "target", "MiMoForCausalLM")
    (tmp_path / "P").write_text('["Write the x ?"]')
    generate = ("train", "generate", "--data", tmp_path / "data", "--exclude", tmp_path / "P")
    commands = (
        (*generate, "--tokens", 9, "--rows", 2, "--target"),
        ("quantize", "--recipe", "w8a8", "--out", tmp_path / "out"),
    )
    for words in commands:  # the control
        assert CliRunner().invoke(app, [*map(str, words), str(folder)]).exit_code == 0
    shutil.rmtree(tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    for words in commands:
        result = CliRunner().invoke(app, [*map(str, words), str(folder)])
        assert result.exit_code == 2, result.exception
        (line,) = [row for row in result.stderr.splitlines() if "sglang-ascend: " in row]
        assert f"{folder / 'config.json'} makes no Qwen2ForCausalLM of transformers" in line
