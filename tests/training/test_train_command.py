"""Invariant: the same commands take a checkpoint of any family to a folder that SGLang serves."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import FAMILIES, write_target
from train_runs import STEPS, run_recipe, train
from typer.testing import CliRunner

from sglang_ascend.checkpoint import CheckpointError, validate_checkpoint
from sglang_ascend.checkpoint.shards import INDEX_NAME
from sglang_ascend.cli import app
from sglang_ascend.models.nano_deepseek import ARTIFACT
from sglang_ascend.training.generation.conversation import FORCED, REPLY, USER
from sglang_ascend.training.generation.shards import read_prompt_list, read_shard
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import new_layer, own_layer, trained_layer

KILLED = """
import os, signal, sys
from sglang_ascend.cli import app
from sglang_ascend.training import export
export.let_others_read = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
app(sys.argv[1:])
"""


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
