"""Invariant: a checkpoint or an option that `quantize` or `evaluate` cannot do right by is refused
in one sentence before any work is done, and what a user reads is whole."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import write_target
from typer.testing import CliRunner

from sglang_ascend.cli import app
from sglang_ascend.ptq.grid.run import Options
from sglang_ascend.ptq.text import own_text
from sglang_ascend.training.export import export
from sglang_ascend.training.generation import generator
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import new_layer

O_PROJ = "model.layers.1.self_attn.o_proj.weight"
DAMAGES = {
    "no embedding": ("model.embed_tokens.weight", lambda t: None, "(first NAME, 1 in"),
    "no head": ("lm_head.weight", lambda t: None, "(first NAME, 1 in"),
    "no last norm": ("model.norm.weight", lambda t: None, "(first NAME, 1 in"),
    "a short head": ("lm_head.weight", lambda t: t[:-1].contiguous(), "holds NAME with shape [9,"),
    "a short linear": (O_PROJ, lambda t: t[:-1].contiguous(), "holds NAME with shape [23,"),
    "NaN in a norm": ("model.norm.weight", lambda t: t * torch.nan, "NaN or infinity in NAME"),
    "NaN in the embedding": (
        "model.embed_tokens.weight",
        lambda t: t * torch.inf,
        "NaN or infinity in NAME",
    ),
    "no projection of the MTP layer": ("model.layers.2.eh_proj.weight", lambda t: None, "NAME"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    target = Target.open(write_target(folder / "target", "DeepseekV3ForCausalLM"))
    export(target, new_layer(target, seed=0), folder / "whole")
    return folder / "whole"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("plain"), "Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def rounded(plain, tmp_path_factory):
    out = tmp_path_factory.mktemp("rounded") / "out"
    run("quantize", plain, "--recipe=w8a8", "--out", out)
    return out


@pytest.fixture
def unwritten(monkeypatch):
    """No text is written; whoever begins to fails."""

    def began(*_):
        raise AssertionError("began to write text")

    monkeypatch.setattr(Options, "written_by", began)


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


def refused(*words):
    last = run(*words, code=2).stderr.splitlines()[-1]
    assert last.startswith("sglang-ascend: ")
    return last


@pytest.mark.parametrize("name", DAMAGES)
def test_an_incomplete_source_is_refused_by_the_tensor(tiny, tmp_path, name):
    tensor, damage, said = DAMAGES[name]
    folder = tmp_path / "damaged"
    shutil.copytree(tiny, folder)
    tensors = load_file(folder / "model.safetensors")
    changed = damage(tensors.pop(tensor))
    kept = tensors if changed is None else tensors | {tensor: changed}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    sentence = refused("quantize", folder, "--recipe=w8a8", "--out", tmp_path / "out")
    assert said.replace("NAME", tensor) in sentence and str(folder) in sentence
    assert not (tmp_path / "out").exists()
    run("quantize", tiny, "--recipe=w8a8", "--out", tmp_path / "whole")  # the control


def test_a_recipe_that_reads_text_needs_a_tokenizer_and_no_other_does(tiny, tmp_path):
    folder = tmp_path / "silent"
    shutil.copytree(tiny, folder)
    (folder / "tokenizer.json").unlink()
    sentence = refused("quantize", folder, "--recipe=w4a8", "--out", tmp_path / "out")
    assert f"{folder} has no tokenizer" in sentence and "copy the one" in sentence
    assert not any(path.name.startswith("out") for path in tmp_path.iterdir())
    run("quantize", folder, "--recipe=w8a8", "--out", tmp_path / "out")
    assert "no tokenizer" in refused("evaluate", tmp_path / "out", "--against", folder)


def test_a_source_without_an_mtp_layer_is_quantized_and_said_to_have_none(tiny, plain, tmp_path):
    said = run("quantize", plain, "--recipe=w8a8", "--out", tmp_path / "plain").stderr
    assert f"{plain} has no MTP layer" in said and "train-mtp" in said
    said = run("quantize", tiny, "--recipe=w8a8", "--out", tmp_path / "tiny").stderr
    assert "no MTP layer" not in said  # the control


def test_evaluate_refuses_what_does_not_fit_before_text_is_written(
    tiny, plain, rounded, tmp_path, unwritten
):
    other = write_target(tmp_path / "other", "Qwen2ForCausalLM", vocab_size=12)
    sentence = refused("evaluate", rounded, "--against", other)
    assert f"{rounded} has a vocabulary of 10 and --against {other} one of 12" in sentence
    llama = write_target(tmp_path / "llama", "LlamaForCausalLM")
    assert "is a Llama" in refused("evaluate", rounded, "--against", llama)
    words = ["evaluate", rounded, "--against", plain]
    assert f"--svg {tmp_path} is a folder" in refused(*words, "--svg", tmp_path)
    for option in ("--cells=int4 *", "--include=*experts*", "--calibration-seeds=2"):
        assert "are of --grid; leave them out" in refused(*words, option)
    with pytest.raises(AssertionError, match="began to write"):  # the control
        CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def test_no_figure_is_cut_where_the_output_is_narrow(plain, rounded, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    words = ["evaluate", rounded, "--against", plain, "--texts", "2"]
    printed = run(*words).stdout
    report = json.loads(run(*words, "--json").stdout)
    for name in ("kl", "reply_kl"):
        figure = report["checkpoints"][1]["domains"]["all"][name]
        low, high = figure["interval_95"]
        assert f"{figure['value']:.5f} ({low:.5f} - {high:.5f})" in printed
    assert "…" not in printed
    assert "…" not in run("inspect", rounded).stdout


def test_a_model_that_has_no_more_user_turns_is_not_asked_for_ever(tiny, monkeypatch):
    monkeypatch.setattr(generator, "prompt_key", lambda prompt: "always this one")
    monkeypatch.setattr(generator, "MAX_DROPPED", 20)
    with pytest.raises(ValueError, match="wrote 1 of 4 conversations and then nothing new"):
        own_text(Target.open(tiny), 0, 4, own_prompt_share=1.0)
