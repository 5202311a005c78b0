"""python -m npu_emulation.random_deepseek FOLDER: a small DeepSeek-V3 of random weights.

It has an MTP layer and the dimensions that SGLang's NPU path takes: a latent of 512 + 64, and
values as wide as the part of the keys that is not rotated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

LAYERS, HIDDEN, VOCABULARY = 3, 256, 4096
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
# What SGLang reads of a DeepSeek's config.json and transformers does not write.
FOR_SGLANG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
}
# As published DeepSeeks turn positions; without it they are turned as they are.
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
# Wide enough that greedy tokens differ from place to place, and are rarely a tie in bfloat16.
SPREAD = 0.08


def build(
    folder: Path, seed: int = 0, token_weight: float = 1.0, yarn: dict[str, Any] | None = None
) -> None:
    """`token_weight` is how much a token's embedding weighs beside what the layers add: with a
    large one the next token often follows from the last one, which the MTP layer then drafts."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(**CONFIG, rope_scaling=yarn)
    model = DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()
    for name, weight in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, 0.0, SPREAD)
    model.model.embed_tokens.weight.data.mul_(token_weight)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file(
        {**weights, **mtp_layer(weights, SPREAD * token_weight)}, file, metadata={"format": "pt"}
    )
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | FOR_SGLANG, indent=2))


def mtp_layer(weights: dict[str, torch.Tensor], spread: float) -> dict[str, torch.Tensor]:
    """A copy of the last layer, fed by the token as the target is, and by a bit of the state."""
    last, new = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    layer = {
        name.replace(last, new): weight.clone()
        for name, weight in weights.items()
        if name.startswith(last)
    }
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    token, state = spread * torch.eye(HIDDEN), torch.randn(HIDDEN, HIDDEN) * 0.05
    return layer | {
        f"{new}eh_proj.weight": torch.cat((token, state), 1).to(torch.bfloat16),
        f"{new}enorm.weight": ones.clone(),
        f"{new}hnorm.weight": ones.clone(),
        f"{new}shared_head.norm.weight": ones.clone(),
        f"{new}shared_head.head.weight": weights["lm_head.weight"].clone(),
        f"{new}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m npu_emulation.random_deepseek")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--token-weight", type=float, default=1.0, help="200: drafts are often right"
    )
    options = parser.parse_args()
    build(options.folder, token_weight=options.token_weight)
