"""The committed nano-deepseek keeps its promises: small, telling dimensions, drafts that help."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from recipes.nano_deepseek.config import NanoConfig
from recipes.nano_deepseek.evaluate import question_prompts, run_prompts
from sglang_ascend.models import nano_deepseek
from sglang_ascend.models.nano_deepseek import ARTIFACT
from sglang_ascend.training.acceptance import Output, evaluate
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.layer import MTPLayer
from sglang_ascend.training.targets.start import new_layer, own_layer

DATA = Path(__file__).parents[1] / "data"


def test_it_is_small_enough_to_commit() -> None:
    assert sum(path.stat().st_size for path in ARTIFACT.iterdir()) <= 20_000_000


def test_no_two_attention_dimensions_coincide() -> None:
    config = json.loads((ARTIFACT / "config.json").read_text())
    qk = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    sizes = [
        config[name]
        for name in (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "hidden_size",
        )
    ]
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert len({*sizes, qk, latent}) == len(sizes) + 2


def test_its_config_is_the_training_models() -> None:
    assert json.loads((ARTIFACT / "config.json").read_text()) == NanoConfig().to_checkpoint()


def test_weights_are_bf16_and_finite_and_the_router_bias_fp32() -> None:
    with safe_open(ARTIFACT / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            bias = name.endswith("e_score_correction_bias")
            assert tensor.dtype == (torch.float32 if bias else torch.bfloat16), name
            assert tensor.isfinite().all(), name


def test_its_provenance_names_text_licences_commands_seeds_and_losses() -> None:
    record = json.loads((ARTIFACT / "provenance.json").read_text())
    assert all(part["licence"] and part["bytes"] for part in record["corpus"])
    assert all(
        record[key] for key in ("commands", "versions", "seeds", "target", "nextn", "acceptance")
    )


def test_build_writes_a_whole_checkpoint(tmp_path: Path) -> None:
    nano_deepseek.build(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(nano_deepseek.FILES)


def test_a_missing_file_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nano_deepseek, "ARTIFACT", tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"lacks model\.safetensors.*recipes/nano_deepseek/recipe\.sh"
    ):
        nano_deepseek.build(tmp_path)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.open(ARTIFACT)


@pytest.fixture(scope="module")
def maths_outputs(target: Target) -> list[Output]:
    """The target's own greedy answers, which drafts are measured on."""
    domain, prompts = question_prompts(ARTIFACT, DATA / "heldout_maths.json")
    return run_prompts(target, domain, prompts, temperature=0.0)


def measure(target: Target, layer: MTPLayer, outputs: list[Output]) -> dict:
    return evaluate(layer, outputs, *target.embedding_and_head(), num_steps=3)["maths"]


def test_drafts_help_on_unseen_maths_questions_as_much_as_claimed(target, maths_outputs) -> None:
    """The interval is of questions drawn at random; on these 160 nothing but rounding varies."""
    record = json.loads((ARTIFACT / "provenance.json").read_text())
    claimed = record["acceptance"]["greedy"]["maths"]
    figures = measure(target, own_layer(target), maths_outputs)
    assert figures["outputs"] == claimed["outputs"] == 160  # none that loops, easy for any draft
    low, high = claimed["interval_95"]
    assert low <= figures["acceptance_length"] <= high
    assert figures["lookup_baseline"] < low


def test_an_untrained_layer_does_not_help(target, maths_outputs) -> None:
    layer = new_layer(target, seed=0)
    assert measure(target, layer, maths_outputs[:40])["acceptance_length"] < 1.2
