"""random-deepseek: a DeepSeek-V3 of random weights and three layers, for devices to be tried with.

An NPU's operators take its sizes, as they take those of published DeepSeeks: a latent of 512 + 64,
values as wide as the part of the keys that is not rotated, groups of four experts. It says nothing
of use. Owns its weights; the tokenizer is nano-deepseek's.
"""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from sglang_ascend.models.nano_deepseek import ARTIFACT

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
    "n_group": 2,
    "topk_group": 1,
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
# As published DeepSeeks scale positions.
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
# Wide enough that greedy tokens differ from place to place, and are rarely a tie in bfloat16.
SPREAD = 0.08
# How much a token's embedding weighs beside what the layers add: the next token often follows from
# the last one, which the MTP layer then drafts.
TOKEN_WEIGHT = 200.0


def build(
    folder: Path, token_weight: float = TOKEN_WEIGHT, yarn: dict[str, Any] | None = YARN
) -> None:
    """Writes the servable checkpoint to `folder`; without `yarn` positions are not scaled."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**CONFIG, "rope_scaling": yarn and dict(yarn)}
    config = DeepseekV3Config(**sizes)
    model = DeepseekV3ForCausalLM(config).bfloat16().eval()
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
    for name in TOKENIZER:
        copyfile(ARTIFACT / name, folder / name)


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
