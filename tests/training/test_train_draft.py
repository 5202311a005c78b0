"""Invariant: `sglang-ascend train-draft` takes a target to a small model that a server accepts
before it. Its layers learn the target's distribution, embedding and head stay, and a training that
was killed ends in the same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_targets import WORDS, write_target
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from sglang_ascend.checkpoint.draft_model import validate_draft_model
from sglang_ascend.cli import app
from sglang_ascend.training import provenance
from sglang_ascend.training.draft_model.start import given_model, some_layers
from sglang_ascend.training.draft_model.student import untrained_student
from sglang_ascend.training.interface import run_chain
from sglang_ascend.training.run_folder import CHECKPOINT
from sglang_ascend.training.targets.families import Target

STEPS = 60
BASE = "--tokens 300 --max-length 64 --max-new-tokens 20 --tokens-per-batch 300 --own-share 0.5"
BASE += f" --threads 1 --num-steps 2 --max-steps {STEPS}"


def train_draft(target: Path, out: Path, *more: object, exit_code: int = 0) -> str:
    """Everything that the command said."""
    held_out = target.parent / "held-out.json"
    command = ["train-draft", target, "--out", out, "--held-out", held_out, *BASE.split(), *more]
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of four layers, one of latent attention, and a small model of another family."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "held-out.json").write_text(json.dumps(["a x the ?", "Write a ? x"]))
    write_target(folder / "target", "LlamaForCausalLM", num_hidden_layers=4, vocab_size=24)
    write_target(folder / "latent", "DeepseekV3ForCausalLM")
    write_target(folder / "small", "Qwen3ForCausalLM", hidden_size=16, vocab_size=16)
    return folder


@pytest.fixture(scope="module")
def finished(models: Path) -> Path:
    """The folder of a command that nothing stopped."""
    train_draft(models / "target", models / "finished", "--init-layers", 2)
    return models / "finished"


def same_weights(first: Path, second: Path) -> bool:
    one, two = (load_file(out / "run" / CHECKPOINT) for out in (first, second))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_the_model_is_served_before_its_target_and_says_where_it_comes_from(
    models: Path, finished: Path
) -> None:
    target, model = models / "target", finished / "model"
    validate_draft_model(target, model)
    record = json.loads((model / "provenance.json").read_text())
    assert record["sha256"]["target"]["model.safetensors"] == provenance.sha256(
        target / "model.safetensors"
    )
    for name, digest in record["sha256"]["model"].items():
        assert provenance.sha256(model / name) == digest
    assert record["options"]["init_layers"] == 2 and record["settings"]["loss"]["kind"] == "kl"
    weights, before = (
        load_file(model / "model.safetensors"),
        load_file(target / "model.safetensors"),
    )
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(weights[name], before[name]), "these stay"
    assert not torch.equal(weights["model.norm.weight"], before["model.norm.weight"])


def test_it_learns_the_target(finished: Path) -> None:
    log = provenance.read_log(finished / "run" / "log.jsonl")
    first, last = log[:5], log[-5:]
    assert sum(line["losses"][0] for line in last) < 0.8 * sum(line["losses"][0] for line in first)
    looks = provenance.read_log(finished / "run" / "acceptance.jsonl")
    assert looks[-1]["step"] == STEPS and all(len(look["accepted"]) == 2 for look in looks)
    assert {"trained", "before"} == json.loads((finished / "acceptance.json").read_text()).keys()


def test_a_killed_training_ends_in_the_same_weights(
    models: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_ascend.training import trainer

    out = tmp_path / "out"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "run")
    save = trainer.Trainer._save

    def killed(self: trainer.Trainer) -> None:
        save(self)
        if self.step >= STEPS // 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_save", killed)
        train_draft(models / "target", out, "--init-layers", 2, exit_code=130)
    assert not same_weights(finished, out), "the control: it did not come to its end"
    said = train_draft(models / "target", out, "--init-layers", 2)
    assert "done before" in said and same_weights(finished, out)


def test_a_given_model_of_another_width_learns_from_a_target_of_latent_attention(
    models: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    train_draft(models / "latent", out, "--draft", models / "small")
    validate_draft_model(models / "latent", out / "model")
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["hidden_size"] == 16
    record = json.loads((out / "model" / "provenance.json").read_text())
    assert "draft before training" in record["sha256"]


def test_the_rows_that_are_trained_and_measured_are_those_that_are_served(models: Path) -> None:
    """transformers on all tokens but the first; a server is compared with the same in
    tests/serving/test_draft_model.py."""
    target = Target.open(models / "target")
    for start in (given_model(target, models / "small"), some_layers(target, 4 - 1)):
        student = untrained_student(start, torch.device("cpu"))
        embedding, head = start.embedding_and_head(torch.device("cpu"))
        tokens = torch.tensor([[1, 3, 5, 7, 8, 9, 4, 6, 2]])
        ignored = torch.full((1, 9, 24), torch.nan)
        with torch.no_grad():
            chain = run_chain(student, ignored, tokens, embedding, 3)
            if start.chosen is None:
                model = AutoModelForCausalLM.from_pretrained(start.folder, dtype=torch.float32)
                expected = model(tokens[:, 1:]).logits
                assert torch.allclose(chain[0] @ head.T, expected, atol=1e-5)
                control = model(tokens[:, :-1]).logits
                assert not torch.allclose(chain[0] @ head.T, control, atol=1e-2)
        for step, rows in enumerate(chain):
            assert torch.equal(rows[:, : 8 - step], chain[0][:, step:])


def test_chosen_layers_are_the_target_s(models: Path) -> None:
    target = Target.open(models / "target")
    start = some_layers(target, 3)
    assert start.chosen == (0, 2, 3)
    weights = untrained_student(start, torch.device("cpu")).state_dict()
    before = load_file(models / "target" / "model.safetensors")
    name = "model.layers.{}.mlp.up_proj.weight"
    for own, layer in enumerate(start.chosen):
        assert torch.equal(weights[name.format(own)], before[name.format(layer)].float())
    assert start.num_tokens == len(WORDS)


@pytest.mark.parametrize(
    ("target", "more", "words"),
    [
        ("target", (), ("--draft FOLDER", "--init-layers N")),
        ("target", ("--init-layers", 2, "--draft", "small"), ("either --draft",)),
        ("target", ("--init-layers", 4), ("--init-layers must be between 1 and 3, got 4",)),
        ("latent", ("--init-layers", 1), ("is a DeepseekV3ForCausalLM", "as --draft")),
        ("target", ("--draft", "latent"), ("is a DeepseekV3ForCausalLM", "pass one of these")),
    ],
)
def test_what_makes_no_draft_is_refused_before_anything_is_computed(
    models: Path, tmp_path: Path, target: str, more: tuple[object, ...], words: tuple[str, ...]
) -> None:
    given = [models / word if word in ("small", "latent") else word for word in more]
    out = tmp_path / "out"
    said = train_draft(models / target, out, *given, exit_code=2)
    (line,) = [row for row in said.splitlines() if row.startswith("sglang-ascend: ")]
    assert all(word in line for word in words), line
    assert not (out / "data").exists()
