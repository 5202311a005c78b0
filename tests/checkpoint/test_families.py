"""Invariant: the names and shapes of families.py are those of the real model classes; the oracle is
transformers, whose modules are built on the meta device from the same configuration.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from sglang_ascend.checkpoint.config import ModelConfig
from sglang_ascend.checkpoint.families import FAMILIES, find_family, target_tensors
from sglang_ascend.torchvision_ops import define_missing_ops

COMMON = {
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
    "vocab_size": 70,
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
LATENT = {
    "kv_lora_rank": 14,
    "num_key_value_heads": 6,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
FUSED_SUFFIXES = (".experts.gate_up_proj", ".experts.down_proj")
# Files have other names than transformers' modules.
RENAMED = {
    "hunyuan": (
        ("mlp.gate.", "mlp.router.gate."),
        ("mlp.e_score_correction_bias", "mlp.expert_bias"),
        ("mlp.shared_experts.", "mlp.shared_mlp."),
    ),
    "ernie": (("mlp.gate.moe_statics.", "mlp.moe_statics."),),
}
SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")
# (architecture of the row, transformers' model, fields)
CASES = {
    "mimo": ("MiMoForCausalLM", "qwen2.Qwen2", {"num_key_value_heads": 2}),
    "deepseek": ("DeepseekV3ForCausalLM", "deepseek_v3.DeepseekV3", {**LATENT, "q_lora_rank": 18}),
    "deepseek, plain q": (
        "DeepseekV3ForCausalLM",
        "deepseek_v3.DeepseekV3",
        {**LATENT, "q_lora_rank": None},
    ),
    "glm": (
        "Glm4MoeForCausalLM",
        "glm4_moe.Glm4Moe",
        {"num_key_value_heads": 2, "head_dim": 10, "attention_bias": True, "use_qk_norm": True},
    ),
    "glm lite": (
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite.Glm4MoeLite",
        {**LATENT, "q_lora_rank": 18},
    ),
    "ernie": (
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe.Ernie4_5_Moe",
        {
            "num_key_value_heads": 2,
            "moe_num_experts": 5,
            "moe_num_shared_experts": 2,
            "moe_k": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
    ),
    "hunyuan": (
        "HYV3ForCausalLM",
        "hy_v3.HYV3",
        {
            "num_key_value_heads": 2,
            "head_dim": 10,
            "num_experts": 5,
            "num_shared_experts": 2,
            "qk_norm": True,
            "route_norm": True,
        },
    ),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        "qwen3_moe.Qwen3Moe",
        {"num_key_value_heads": 2, "head_dim": 10, "num_experts": 5, "attention_bias": True},
    ),
    "glm, plain": (
        "Glm4MoeForCausalLM",
        "glm4_moe.Glm4Moe",
        {"num_key_value_heads": 3, "head_dim": 6, "attention_bias": False, "use_qk_norm": False},
    ),
}


def transformers_shapes(model: str, fields: dict) -> dict[str, tuple[int, ...]]:
    define_missing_ops()
    module, class_name = model.split(".")
    package = f"transformers.models.{module}"
    configuration = importlib.import_module(f"{package}.configuration_{module}")
    modeling = importlib.import_module(f"{package}.modeling_{module}")
    config = getattr(configuration, f"{class_name}Config")(**fields)
    with torch.device("meta"):
        state = getattr(modeling, f"{class_name}ForCausalLM")(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def row_and_config(architecture: str, fields: dict):
    config = ModelConfig(Path("config.json"), fields, architecture, quantized=False)
    family = find_family(config)
    assert family is not None
    return family, config


@pytest.mark.parametrize("case", CASES)
def test_target_tensors_are_those_of_transformers(case: str) -> None:
    architecture, model, own = CASES[case]
    fields = {**COMMON, **({} if "mimo" in case else EXPERTS), **own}
    actual = transformers_shapes(model, fields)
    for theirs, files in RENAMED.get(case, ()):
        actual = {name.replace(theirs, files): shape for name, shape in actual.items()}
    family, config = row_and_config(architecture, fields)
    expected = {e.name: e for layer in target_tensors(family, config) for e in layer}

    # transformers 5 holds all experts of a layer as one tensor; the file may have either form.
    fused = {name for name in actual if name.endswith(FUSED_SUFFIXES)}
    assert bool(fused) == ("mimo" not in case)
    assert actual.keys() - expected.keys() <= fused
    single_experts = {name for name in expected if SINGLE_EXPERT.search(name)}
    assert bool(single_experts) == bool(fused)
    for name in expected.keys() - single_experts:
        assert actual.get(name) == expected[name].shape, name


def test_every_row_is_found_by_both_of_its_names() -> None:
    for family in FAMILIES:
        assert row_and_config(family.architecture, {})[0] is family
        by_draft = row_and_config(family.draft_architecture, {})[0]
        assert by_draft.mtp_prefix == family.mtp_prefix and by_draft.layer is family.layer
