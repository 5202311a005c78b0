"""random-deepseek can be served, with sizes that torch_npu documents; nano-deepseek has none.

`make test-npu-emulated` serves it with its calls checked; `verify-npu` compares its tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from npu_calls import FP32, empty
from transformers import AutoTokenizer

from sglang_ascend.checkpoint.validate import validate_checkpoint
from sglang_ascend.models.catalog import model_path
from sglang_ascend.ops.npu import refusal
from sglang_ascend.verify.reference_tokens import ReferenceTokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_path("random-deepseek", tmp_path_factory.mktemp("cache"))


def calls_of(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What latent attention and a gate ask of torch_npu, by a model's sizes."""
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    heads, angles = config["num_attention_heads"], empty(4, 1, 1, rotated)
    experts = config["n_routed_experts"]
    return {
        "npu_interleave_rope": {"x": empty(4, heads, 1, rotated), "cos": angles, "sin": angles},
        "npu_kv_rmsnorm_rope_cache": {
            "kv": empty(4, 1, 1, latent + rotated),
            "gamma": empty(latent),
            "cos": angles,
            "sin": angles,
            "index": empty(4, dtype=torch.int64),
            "k_cache": empty(9, 128, 1, rotated),
            "ckv_cache": empty(9, 128, 1, latent),
        },
        "npu_moe_gating_top_k": {
            "x": empty(4, experts, dtype=FP32),
            "k": config["num_experts_per_tok"],
            "bias": empty(experts, dtype=FP32),
            "k_group": config["topk_group"],
            "group_count": config["n_group"],
        },
    }


def test_its_sizes_are_documented_and_nano_deepseeks_are_not(folder):
    for model, is_taken in ((folder, True), (model_path("nano-deepseek"), False)):
        config = json.loads((model / "config.json").read_text())
        for name, call in calls_of(config).items():
            assert (refusal(name, (), call) is None) == is_taken, name


def test_it_can_be_served_and_has_a_tokenizer(folder):
    summary = validate_checkpoint(folder)
    assert summary is not None and summary.num_mtp_tensors > 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) <= json.loads((folder / "config.json").read_text())["vocab_size"]


def test_bfloat16_tells_its_tokens_apart(folder):
    """Else verify-npu could not judge a card by it."""
    reference = ReferenceTokens(folder, "bfloat16")
    tokens = reference.prompt("What is 17 + 25?")
    judged = reference.judge(tokens[:1], tokens[1:])
    margins, ties = (sorted(values)[len(values) // 2] for values in (judged.margins, judged.ties))
    assert ties < margins / 2
