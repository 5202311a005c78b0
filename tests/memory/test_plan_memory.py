"""`plan-memory` counts the bytes that files hold, and shares them as SGLang's ranks do."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from sglang_ascend.checkpoint.config import ModelConfig, read_config
from sglang_ascend.checkpoint.families import find_family
from sglang_ascend.cli import app
from sglang_ascend.memory.plan import Deployment, Share, plan, share_of, tensors
from sglang_ascend.models import catalog
from sglang_ascend.ptq.quantize import Quantization
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.recipe import read_recipe
from sglang_ascend.speculative.skipped import SkippedRows

ALONE = Deployment(ranks=1)
RECIPES = ("w8a8", "w4a8", "w4a16", "fp8", "w8a8-head")
# What the published config.json has and transformers' defaults lack.
PUBLISHED = {
    "DeepseekV3": {"moe_layer_freq": 1, "topk_method": "noaux_tc"},
    "Glm4Moe": {"head_dim": 128, "attention_bias": True},
    "Ernie4_5_Moe": {},
    "HYV3": {"first_k_dense_replace": 1, "route_norm": True, "qk_norm": True},
    "Qwen3Moe": {},
}


def folder_of(name: str, folder: Path) -> Path:
    fields = config_of(name).to_dict()
    fields |= {"architectures": [f"{name}ForCausalLM"], **PUBLISHED[name]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def config_of(name: str) -> transformers.PretrainedConfig:
    return getattr(transformers, f"{name}Config")(**PUBLISHED[name])


def asked(*words: str):
    return CliRunner().invoke(app, ["plan-memory", *words])


def held_bytes(folder: Path) -> int:
    """Of every tensor that the files of a quantized checkpoint hold, read one by one."""
    checkpoint = Checkpoint.open(folder)
    quantized = sum(checkpoint.weight(module).num_bytes for module in checkpoint.schemes)
    return quantized + sum(checkpoint.entries[n].num_bytes for n in checkpoint.float_names())


@pytest.mark.parametrize("model", ["nano-deepseek", "smollm2-mtp"])
def test_float_weights_are_the_bytes_of_the_files(model):
    folder = catalog.model_path(model)
    entries = Checkpoint.open(folder).entries
    found = plan(read_config(folder), "bf16", ALONE)
    counted = {tensor.name for tensor in tensors(*of(folder))}
    assert counted == entries.keys()
    assert found.total_bytes == sum(entry.num_bytes for entry in entries.values())
    assert found.rank_bytes == found.total_bytes


def of(folder: Path):
    config = read_config(folder)
    return find_family(config), config


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_weights_are_the_bytes_of_the_files(recipe, tmp_path):
    folder = catalog.model_path("nano-deepseek")
    Quantization(folder, read_recipe(recipe), tmp_path / "out", num_texts=2).run()
    found = plan(read_config(folder), recipe, ALONE)
    assert found.total_bytes == held_bytes(tmp_path / "out")
    others = {name for name in RECIPES if name != recipe}  # the control
    assert all(plan(read_config(folder), other, ALONE) != found for other in others)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_transformers_parameters(name, tmp_path):
    config = read_config(folder_of(name, tmp_path / name))
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config_of(name))
    counted = [t for t in tensors(find_family(config), config) if is_target(t.name, config)]
    held = model.state_dict()
    if config.flag("tie_word_embeddings"):
        del held["lm_head.weight"]
    assert sum(prod(t.shape) for t in counted) == sum(tensor.numel() for tensor in held.values())


def is_target(name: str, config: ModelConfig) -> bool:
    last = config.size("num_hidden_layers")
    return not name.startswith((f"model.layers.{last}.", "model.mtp_", "mtp."))


def test_the_shares_are_those_of_sglang_s_layers():
    layer = "model.layers.3."
    shares = {
        "model.embed_tokens.weight": Share.VOCABULARY,
        "lm_head.weight": Share.VOCABULARY,
        "model.norm.weight": Share.WHOLE,
        f"{layer}input_layernorm.weight": Share.WHOLE,
        f"{layer}self_attn.q_a_proj.weight": Share.WHOLE,
        f"{layer}self_attn.q_a_layernorm.weight": Share.WHOLE,
        f"{layer}self_attn.kv_a_proj_with_mqa.weight": Share.WHOLE,
        f"{layer}self_attn.q_b_proj.weight": Share.HEADS,
        f"{layer}self_attn.kv_b_proj.weight": Share.HEADS,
        f"{layer}self_attn.o_proj.weight": Share.HEADS,
        f"{layer}self_attn.k_proj.weight": Share.KEY_VALUE_HEADS,
        f"{layer}self_attn.k_norm.weight": Share.WHOLE,
        f"{layer}mlp.gate.weight": Share.WHOLE,
        f"{layer}mlp.router.gate.weight": Share.WHOLE,
        f"{layer}mlp.expert_bias": Share.WHOLE,
        f"{layer}mlp.shared_mlp.up_proj.weight": Share.RANKS,
        "model.mtp_linear_proj.0.weight": Share.WHOLE,
        "model.mtp_block.0.mlp.up_proj.weight": Share.RANKS,
        f"{layer}mlp.gate_proj.weight": Share.RANKS,
        f"{layer}mlp.experts.7.down_proj.weight": Share.RANKS,
        f"{layer}mlp.shared_experts.up_proj.weight": Share.RANKS,
        f"{layer}eh_proj.weight": Share.WHOLE,
    }
    assert {name: share_of(name) for name in shares} == shares


def test_ranks_hold_all_and_what_is_on_each_of_them_as_often(tmp_path):
    folder = folder_of("DeepseekV3", tmp_path / "v3")
    family, config = of(folder)
    copied = sum(
        2 * prod(tensor.shape)
        for tensor in tensors(family, config)
        if share_of(tensor.name) is Share.WHOLE
    )
    whole = plan(config, "bf16", ALONE)
    eight = plan(config, "bf16", Deployment(8))
    # A router's bias is float32, 4 bytes where the line above has 2.
    assert 8 * eight.rank_bytes - whole.total_bytes == pytest.approx(7 * copied, rel=1e-3)
    groups = plan(config, "bf16", Deployment(8, attention_groups=8))
    assert groups.rank_bytes > eight.rank_bytes  # each has all heads
    assert groups.token_bytes == eight.token_bytes == 2 * 62 * 576


def test_the_cache_takes_what_is_left(tmp_path):
    config = read_config(folder_of("Glm4Moe", tmp_path / "glm"))
    found = plan(config, "w8a8", Deployment(4, context_length=8192))
    assert found.token_bytes == 2 * 47 * 2 * 2 * 128  # 8 heads of keys and of values over 4 ranks
    room = 0.8 * (64 << 30) - found.rank_bytes
    assert found.tokens == int(room // found.token_bytes)
    assert found.requests == found.tokens // 8192
    assert plan(config, "bf16", Deployment(2)).tokens == 0
    with_groups = plan(config, "w8a8", Deployment(4, attention_groups=4))
    assert with_groups.token_bytes == 4 * found.token_bytes


def test_adaptive_drafting_keeps_a_row_beside_each_token(tmp_path):
    config = read_config(folder_of("DeepseekV3", tmp_path / "v3"))
    plain, adaptive = (
        plan(config, "w8a8", Deployment(16, adaptive=adaptive)) for adaptive in (False, True)
    )
    kept = SkippedRows(1, 7168, torch.bfloat16, "cpu")
    assert adaptive.token_bytes - plain.token_bytes == kept.hidden.nbytes + kept.next_tokens.nbytes
    room = 0.8 * (64 << 30) - plain.rank_bytes
    assert 0 < adaptive.tokens == int(room // adaptive.token_bytes) < plain.tokens


def test_the_published_table_of_the_page_is_what_the_command_prints(tmp_path):
    page = (Path(__file__).parents[2] / "docs/ascend.md").read_text(encoding="utf-8")
    rows = [
        line for line in page.splitlines() if line.startswith(("| DeepSeek-V3", "| GLM-4.5-Air"))
    ]
    assert len(rows) == 6
    for row in rows:
        model, weights, total, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        name = "DeepseekV3" if model.startswith("DeepSeek") else "Glm4Moe"
        folder = tmp_path / name
        folder = folder if folder.exists() else folder_of(name, folder)
        for ranks, cell in zip((1, 4, 8, 16), cells, strict=True):
            words = ["--weights", weights, "--ranks", str(ranks), "--json", str(folder)]
            (found,) = json.loads(asked(*words).stdout)
            assert total == f"{found['total_bytes'] / 1e9:,.0f} GB"
            assert cell == (f"{found['tokens'] // 1000:,}" if found["tokens"] else "-")


def test_what_cannot_be_planned_is_refused_in_a_sentence(tmp_path):
    folder = folder_of("DeepseekV3", tmp_path / "v3")
    for words, sentence in (
        ((str(tmp_path / "no"),), "config.json is missing"),
        ((str(folder), "--ranks", "3"), "128 attention heads, which 3 ranks do not divide"),
        ((str(folder), "--ranks", "8", "--dp-size", "3"), "--dp-size 3 does not divide --ranks 8"),
        ((str(folder), "--weights", "w1a1"), "--recipe w1a1 is neither"),
    ):
        result = asked(*words)
        assert result.exit_code == 2
        assert sentence in " ".join(result.stderr.split())


def test_it_prints_a_table(tmp_path):
    folder = folder_of("DeepseekV3", tmp_path / "v3")
    result = asked(str(folder), "--ranks", "16", "--weights", "w8a8", "--weights", "bf16")
    assert result.exit_code == 0
    assert "w8a8" in result.stdout and "does not" in result.stdout
