"""`plan-memory` counts the bytes of files in all, and on a rank those of the weights that a server
on an NPU has loaded (`npu_emulation/test_held_bytes.py` compares them with such servers)."""

import importlib.util
import json
import re
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from memory.planned import PUBLISHED, config_of, folder_of, of, planned
from typer.testing import CliRunner

from sglang_ascend.checkpoint.config import ModelConfig, read_config
from sglang_ascend.checkpoint.families import find_family
from sglang_ascend.cli import app
from sglang_ascend.memory.plan import EXCHANGE_ROWS, Deployment
from sglang_ascend.memory.weights import FUSED, Share, share_of, tensors
from sglang_ascend.models import catalog
from sglang_ascend.quantization.checkpoint import Checkpoint, read_tensor
from sglang_ascend.quantization.product import held
from sglang_ascend.quantization.recipe import read_recipe
from sglang_ascend.speculative.skipped import SkippedRows
from sglang_ascend.speculative.vocabulary.file import FILE_NAME, read_draft_vocabulary


def asked(*words: str):
    return CliRunner().invoke(app, ["plan-memory", *words])


@pytest.mark.parametrize("model", ["nano-deepseek", "smollm2-mtp"])
def test_float_weights_are_the_bytes_of_the_files(model):
    folder = catalog.model_path(model)
    entries, config = Checkpoint.open(folder).entries, read_config(folder)
    found = planned(config, "bf16")
    counted = {tensor.name for tensor in tensors(*of(folder))}
    assert counted == entries.keys()
    assert found.total_bytes == sum(entry.num_bytes for entry in entries.values())
    twice = sum(entry.num_bytes for name, entry in entries.items() if "kv_b_proj" in name)
    if (listed := read_draft_vocabulary(folder, config.size("vocab_size"))) is not None:
        twice += read_tensor(entries["model.embed_tokens.weight"])[listed].nbytes
    assert found.rank_bytes == found.total_bytes + twice


def test_linears_are_joined_as_sglang_s_models_join_them():
    (place,) = importlib.util.find_spec("sglang").submodule_search_locations
    models = Path(place) / "srt/models"
    files = ("mimo", "qwen2", "glm4_moe", "glm4_moe_lite", "hunyuan_v3", "qwen3_moe")
    files += ("deepseek_common/deepseek_weight_loader",)
    joined = {}
    for file in files:
        text = (models / f"{file}.py").read_text(encoding="utf-8")
        pairs = re.findall(r'\("(\w+_proj)", "(\w+_proj)", (?:"\w"|\d)\)', text)
        assert pairs, file
        joined |= {part: whole for whole, part in pairs}
    latent = (models / "deepseek_v2.py").read_text(encoding="utf-8")
    (parts,) = re.findall(r'mapping\["fused_qkv_a_proj_with_mqa"\] = \[([^]]*)\]', latent)
    joined |= dict.fromkeys(re.findall(r"\w+", parts), "fused_qkv_a_proj_with_mqa")
    assert joined == FUSED


def test_what_no_operator_of_an_npu_multiplies_is_held_decoded_and_named(tmp_path):
    config = read_config(folder_of("Glm4Moe", tmp_path / "glm"))
    experts = ["experts.down_proj", "experts.gate_proj", "experts.up_proj"]
    floats = planned(config, "bf16")
    assert planned(config, "w4a4").decoded == {"W4A4 rotated": experts}
    assert 0.95 < planned(config, "w4a4").rank_bytes / floats.rank_bytes < 1
    assert planned(config, "w8a8").decoded == {}
    assert planned(config, "fp8").rank_bytes == floats.rank_bytes
    # 10944 / 2 and 1408 / 2 columns are whole groups of 32, but 1408 / 8 are not.
    assert planned(config, "w4a16", Deployment(2)).decoded == {}
    cut = planned(config, "w4a16", Deployment(8)).decoded
    assert "experts.down_proj" in cut["W4A16"] and "o_proj" not in cut["W4A16"]


@pytest.mark.parametrize("name", ["DeepseekV3", "Glm4Moe"])
def test_inputs_that_stay_float_would_add_little_to_a_rank(name, tmp_path):
    config = read_config(folder_of(name, tmp_path / "model"))
    path = tmp_path / "w8a16.yaml"
    linears = "qconfig: {weight: {scope: per_channel, dtype: int8}}, exclude: ['*kv_b_proj']"
    path.write_text(f"spec: {{process: [{{type: linear_quant, {linears}}}]}}")
    for ranks in (1, 16):
        mixed, floats = (
            planned(config, one, Deployment(ranks)).rank_bytes for one in ("w8a8-mixed", str(path))
        )
        assert 0 < floats - mixed < 8e-3 * mixed


def test_a_server_that_would_not_start_holds_nothing(tmp_path):
    config = read_config(folder_of("Glm4Moe", tmp_path / "glm"))
    found = planned(config, "w8a8-rotated", Deployment(2))
    assert found.refused.startswith("rotated inputs cannot be cut into parts")
    assert (found.rank_bytes, found.tokens) == (0, 0) < (found.total_bytes, 1)
    assert not planned(config, "w8a8-rotated").refused
    result = asked(str(tmp_path / "glm"), "--weights", "w8a8-rotated", "--ranks", "2")
    assert "rotated inputs cannot be cut into parts" in result.stdout


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
    whole = planned(config, "bf16")
    eight = planned(config, "bf16", Deployment(8))
    # A router's bias is float32, 4 bytes where the line above has 2.
    assert 8 * eight.rank_bytes - whole.rank_bytes == pytest.approx(7 * copied, rel=1e-3)
    groups = planned(config, "bf16", Deployment(8, attention_groups=8))
    assert groups.rank_bytes > eight.rank_bytes  # each has all heads
    assert groups.token_bytes == eight.token_bytes == 2 * 62 * 576


@pytest.mark.sglang
@pytest.mark.parametrize("weights", ["bf16", "w8a8", "w8a8-head"])
def test_a_draft_vocabulary_s_head_is_held_beside_the_whole_one(tmp_path, weights):
    """The control: where ranks split the head, drafts use all of it."""
    from sglang_ascend.plugin.requests.weight_updates import cut_head

    folder = folder_of("Glm4Moe", tmp_path / "glm")
    config, ids = read_config(folder), torch.arange(5, 4101)
    deployments = Deployment(1), Deployment(2)
    before = [planned(config, weights, one).rank_bytes for one in deployments]
    (folder / FILE_NAME).write_text(json.dumps({"token_ids": ids.tolist()}))
    alone, split = (planned(config, weights, one).rank_bytes for one in deployments)

    shape = config.size("vocab_size"), config.size("hidden_size")
    if weights == "w8a8-head":
        whole = read_recipe(weights).head_scheme.without_values(*shape, "modelslim")
        kept = held(whole.selected(ids), torch.bfloat16, needs_body=True).num_bytes
    else:
        rows, model = torch.empty(shape, dtype=torch.bfloat16), Drafting()
        cut_head(model, rows, rows, ids)
        kept = model.lm_head.weight.nbytes
    assert alone - before[0] == kept > 0
    assert split == before[1]


def test_a_draft_vocabulary_that_no_server_takes_is_refused(tmp_path):
    folder = folder_of("Glm4Moe", tmp_path / "glm")
    (folder / FILE_NAME).write_text("{}")
    result = asked(str(folder))
    assert result.exit_code == 2 and FILE_NAME in result.stderr


class Drafting(torch.nn.Module):
    """As much of an MTP layer's model as has an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = torch.nn.Module(), torch.nn.Linear(1, 1, bias=False)
        self.model.embed_tokens = torch.nn.Linear(1, 1, bias=False)


def test_the_cache_takes_what_is_left(tmp_path):
    config = read_config(folder_of("Glm4Moe", tmp_path / "glm"))
    found = planned(config, "w8a8", Deployment(4, context_length=8192))
    assert found.token_bytes == 2 * 47 * 2 * 2 * 128  # 8 heads of keys and of values over 4 ranks
    room = 0.8 * (64 << 30) - found.rank_bytes
    assert found.tokens == int(room // found.token_bytes)
    assert found.requests == found.tokens // 8192
    assert planned(config, "bf16", Deployment(2)).tokens == 0
    with_groups = planned(config, "w8a8", Deployment(4, attention_groups=4))
    assert with_groups.token_bytes == 4 * found.token_bytes


def test_adaptive_drafting_keeps_a_row_beside_each_token(tmp_path):
    config = read_config(folder_of("DeepseekV3", tmp_path / "v3"))
    plain, adaptive = (
        planned(config, "w8a8", Deployment(16, adaptive=adaptive)) for adaptive in (False, True)
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
        ranks = [word for number in (1, 4, 8, 16) for word in ("--ranks", str(number))]
        result = asked("--weights", weights, *ranks, "--json", str(folder))
        for found, cell in zip(json.loads(result.stdout), cells, strict=True):
            assert total == f"{found['total_bytes'] / 1e9:,.0f} GB"
            assert cell == (f"{found['tokens'] // 1000:,}" if found["tokens"] else "-")


@pytest.mark.sglang
def test_groups_that_no_server_on_an_npu_has_are_not_served(tmp_path):
    from sglang_ascend.plugin.mtp.refusals import EXCHANGE_ROWS as OF_A_START

    v3, glm = (folder_of(name, tmp_path / name) for name in ("DeepseekV3", "Glm4Moe"))
    assert EXCHANGE_ROWS == OF_A_START
    fewer = planned(read_config(v3), "bf16", Deployment(16, attention_groups=8))
    other = planned(read_config(glm), "bf16", Deployment(8, attention_groups=8))
    assert "pass --ranks 8" in fewer.refused and "DeepseekV3ForCausalLM only" in other.refused
    assert (fewer.rank_bytes, fewer.tokens) == (0, 0) == (other.rank_bytes, other.tokens)
    (served,) = json.loads(asked(str(v3), "--dp-size", "8", "--weights", "w4a8", "--json").stdout)
    assert served["ranks"] == 8 and not served["refused"]


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
