"""Published models by their config.json, and what `plan-memory` says of a model."""

from __future__ import annotations

import json
from pathlib import Path

import transformers

from sglang_ascend.checkpoint.config import ModelConfig, read_config
from sglang_ascend.checkpoint.families import Family, find_family
from sglang_ascend.memory.plan import Deployment, Plan, plan
from sglang_ascend.memory.weights import Weights

ALONE = Deployment(ranks=1)
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


def planned(config: ModelConfig, weights: str, deployment: Deployment = ALONE) -> Plan:
    return plan(config, Weights.of(config, weights), deployment)


def of(folder: Path) -> tuple[Family | None, ModelConfig]:
    config = read_config(folder)
    return find_family(config), config
