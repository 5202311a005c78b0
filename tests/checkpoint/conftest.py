"""Tiny checkpoints of each family, written by the safetensors library from literal shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

BODY_SHARD = "model-00001-of-00002.safetensors"
MTP_SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"

MIMO_CONFIG = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": True,
    "vocab_size": 50,
}
MIMO_LAYER = {
    "self_attn.q_proj.weight": (24, 24),
    "self_attn.q_proj.bias": (24,),
    "self_attn.k_proj.weight": (8, 24),
    "self_attn.k_proj.bias": (8,),
    "self_attn.v_proj.weight": (8, 24),
    "self_attn.v_proj.bias": (8,),
    "self_attn.o_proj.weight": (24, 24),
    "mlp.gate_proj.weight": (40, 24),
    "mlp.up_proj.weight": (40, 24),
    "mlp.down_proj.weight": (24, 40),
    "input_layernorm.weight": (24,),
    "post_attention_layernorm.weight": (24,),
}
MIMO_OUTSIDE = {"model.embed_tokens.weight": (50, 24), "model.norm.weight": (24,)}
MIMO_MTP = {
    "input_proj.weight": (24, 48),
    "token_layernorm.weight": (24,),
    "hidden_layernorm.weight": (24,),
    "final_layernorm.weight": (24,),
}

DEEPSEEK_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "hidden_size": 32,
    "intermediate_size": 44,
    "kv_lora_rank": 14,
    "moe_intermediate_size": 20,
    "moe_layer_freq": 1,
    "n_routed_experts": 2,
    "n_shared_experts": 2,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 18,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "v_head_dim": 10,
    "vocab_size": 60,
}
DEEPSEEK_ATTENTION = {
    "self_attn.q_a_proj.weight": (18, 32),
    "self_attn.q_a_layernorm.weight": (18,),
    "self_attn.q_b_proj.weight": (32, 18),
    "self_attn.kv_a_proj_with_mqa.weight": (18, 32),
    "self_attn.kv_a_layernorm.weight": (14,),
    "self_attn.kv_b_proj.weight": (44, 14),
    "self_attn.o_proj.weight": (32, 20),
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
}
DEEPSEEK_DENSE = {
    "mlp.gate_proj.weight": (44, 32),
    "mlp.up_proj.weight": (44, 32),
    "mlp.down_proj.weight": (32, 44),
}
DEEPSEEK_EXPERTS = {
    "mlp.gate.weight": (2, 32),
    "mlp.gate.e_score_correction_bias": (2,),
    "mlp.experts.0.gate_proj.weight": (20, 32),
    "mlp.experts.0.up_proj.weight": (20, 32),
    "mlp.experts.0.down_proj.weight": (32, 20),
    "mlp.experts.1.gate_proj.weight": (20, 32),
    "mlp.experts.1.up_proj.weight": (20, 32),
    "mlp.experts.1.down_proj.weight": (32, 20),
    "mlp.shared_experts.gate_proj.weight": (40, 32),
    "mlp.shared_experts.up_proj.weight": (40, 32),
    "mlp.shared_experts.down_proj.weight": (32, 40),
}
DEEPSEEK_OUTSIDE = {
    "model.embed_tokens.weight": (60, 32),
    "model.norm.weight": (32,),
    "lm_head.weight": (60, 32),
}
NEXTN = {
    "eh_proj.weight": (32, 64),
    "enorm.weight": (32,),
    "hnorm.weight": (32,),
    "shared_head.norm.weight": (32,),
}

GLM_CONFIG = {
    **{k: v for k, v in DEEPSEEK_CONFIG.items() if not k.endswith(("_rank", "moe_layer_freq"))},
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "head_dim": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_qk_norm": True,
}
GLM_ATTENTION = {
    "self_attn.q_proj.weight": (24, 32),
    "self_attn.q_proj.bias": (24,),
    "self_attn.k_proj.weight": (12, 32),
    "self_attn.k_proj.bias": (12,),
    "self_attn.v_proj.weight": (12, 32),
    "self_attn.v_proj.bias": (12,),
    "self_attn.o_proj.weight": (32, 24),
    "self_attn.q_norm.weight": (6,),
    "self_attn.k_norm.weight": (6,),
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
}

Shapes = dict[str, tuple[int, ...]]


class TinyCheckpoint:
    """A two-shard checkpoint: change `config` or `tensors` and save again, or damage its files."""

    def __init__(self, folder: Path, config: dict[str, Any], body: Shapes, mtp: Shapes) -> None:
        folder.mkdir()
        generator = torch.Generator().manual_seed(0)
        self.folder = folder
        self.config = dict(config)
        self.mtp_names = list(mtp)
        self.tensors = {
            name: torch.randn(shape, generator=generator).to(torch.bfloat16)
            for name, shape in {**body, **mtp}.items()
        }
        self.save()

    def save(self) -> None:
        shard_of = {n: MTP_SHARD if n in self.mtp_names else BODY_SHARD for n in self.tensors}
        for shard in (BODY_SHARD, MTP_SHARD):
            held = {n: t for n, t in self.tensors.items() if shard_of[n] == shard}
            if held:
                save_file(held, self.folder / shard)
        self.write_json(INDEX, {"metadata": {}, "weight_map": shard_of})
        self.write_json("config.json", self.config)
        self.write_json("tokenizer.json", {"model": {"vocab": {}}})

    def write_json(self, name: str, value: Any) -> None:
        (self.folder / name).write_text(json.dumps(value), encoding="utf-8")

    def edit_bytes(self, name: str, edit: Callable[[bytes], bytes]) -> None:
        path = self.folder / name
        path.write_bytes(edit(path.read_bytes()))

    def edit_index(self, edit: Callable[[dict[str, str]], object]) -> None:
        index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
        edit(index["weight_map"])
        self.write_json(INDEX, index)


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _build_mimo(folder: Path) -> TinyCheckpoint:
    body = {
        **MIMO_OUTSIDE,
        **_under("model.layers.0", MIMO_LAYER),
        **_under("model.layers.1", MIMO_LAYER),
    }
    mtp = _under("model.mtp_layers.0", {**MIMO_MTP, **MIMO_LAYER})
    return TinyCheckpoint(folder, MIMO_CONFIG, body, mtp)


def _build_deepseek(folder: Path) -> TinyCheckpoint:
    body = {
        **DEEPSEEK_OUTSIDE,
        **_under("model.layers.0", {**DEEPSEEK_ATTENTION, **DEEPSEEK_DENSE}),
        **_under("model.layers.1", {**DEEPSEEK_ATTENTION, **DEEPSEEK_EXPERTS}),
    }
    mtp = _under("model.layers.2", {**NEXTN, **DEEPSEEK_ATTENTION, **DEEPSEEK_EXPERTS})
    return TinyCheckpoint(folder, DEEPSEEK_CONFIG, body, mtp)


def _build_glm(folder: Path) -> TinyCheckpoint:
    body = {
        **DEEPSEEK_OUTSIDE,
        **_under("model.layers.0", {**GLM_ATTENTION, **DEEPSEEK_DENSE}),
        **_under("model.layers.1", {**GLM_ATTENTION, **DEEPSEEK_EXPERTS}),
    }
    mtp = _under("model.layers.2", {**NEXTN, **GLM_ATTENTION, **DEEPSEEK_EXPERTS})
    return TinyCheckpoint(folder, GLM_CONFIG, body, mtp)


BUILDERS = {"mimo": _build_mimo, "deepseek": _build_deepseek, "glm4_moe": _build_glm}


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., TinyCheckpoint]:
    """build(family, name="model") writes a whole, valid checkpoint into a fresh folder."""

    def build_checkpoint(family: str, name: str = "model") -> TinyCheckpoint:
        return BUILDERS[family](tmp_path / name)

    return build_checkpoint
