"""Checkpoints of every family, small enough to train in seconds, with a ten-word tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
# As DeepSeek's: a user turn has no end of its own, the reply's header ends it.
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'user' %}user {{ m['content'] }} assistant "
    "{% else %}{{ m['content'] }} <|im_end|> {% endif %}{% endfor %}"
)
WORDS = ["<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant", "Write", "the", "a", "?", "x"]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "eos_token_id": WORDS.index("<|im_end|>"),
    "bos_token_id": WORDS.index("<|im_start|>"),
    "initializer_range": 0.5,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
LATENT = {
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_key_value_heads": 6,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
}
GROUPED = {"num_key_value_heads": 2}
# By family: class and config of transformers, chat template, and what config.json names.
FAMILIES = {
    "MiMoForCausalLM": ("Qwen2", GROUPED | {"tie_word_embeddings": True}, CHATML),
    "DeepseekV3ForCausalLM": ("DeepseekV3", EXPERTS | LATENT, DEEPSEEK),
    "Glm4MoeForCausalLM": (
        "Glm4Moe",
        EXPERTS | GROUPED | {"head_dim": 8, "use_qk_norm": True, "attention_bias": True},
        CHATML,
    ),
    "Glm4MoeLiteForCausalLM": ("Glm4MoeLite", EXPERTS | LATENT, CHATML),
}
# Served and not trained; `served_families` adds their MTP layers. By default they differ in the
# base of the rotation.
ROTATION = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
SERVED_ONLY = {
    "Ernie4_5_MoeForCausalLM": (
        "Ernie4_5_Moe",
        GROUPED
        | ROTATION
        | {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "use_bias": False,
            "tie_word_embeddings": True,
            "num_nextn_predict_layers": 1,
        },
        CHATML,
    ),
    "HYV3ForCausalLM": (
        "HYV3",
        GROUPED
        | ROTATION
        | {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "router_scaling_factor": 1.5,
            "route_norm": True,
            "qk_norm": True,
            "num_nextn_predict_layers": 1,
        },
        CHATML,
    ),
    "Qwen3MoeForCausalLM": (
        "Qwen3Moe",
        GROUPED
        | ROTATION
        | {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
        CHATML,
    ),
}
# Without an MTP layer: models that draft for others, of which a Llama or Qwen2 may become a MiMo.
PLAIN = {
    "LlamaForCausalLM": ("Llama", GROUPED, CHATML),
    "Qwen2ForCausalLM": ("Qwen2", GROUPED, CHATML),
    "Qwen3ForCausalLM": ("Qwen3", GROUPED | {"head_dim": 8}, CHATML),
}


def write_target(path: Path, family: str, **changes: object) -> Path:
    """A random checkpoint of `family` without an MTP layer; `changes` overrule its config."""
    name, fields, template = (FAMILIES | SERVED_ONLY | PLAIN)[family]
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | fields | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(path)
    # As published configs have it: every field is there, the rotary base by its older name.
    written = json.loads((path / "config.json").read_text())
    written |= fields | {"architectures": [family], "rope_theta": 10000.0}
    (path / "config.json").write_text(json.dumps(written))
    return path
