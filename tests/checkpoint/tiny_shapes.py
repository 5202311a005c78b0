"""config.json and tensors of a tiny model of each family, as literals."""

from __future__ import annotations

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

ERNIE_CONFIG = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "hidden_size": 32,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 2,
    "moe_num_shared_experts": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": 60,
}
ERNIE_ATTENTION = {
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
}
ERNIE_EXPERTS = {
    "mlp.moe_statics.e_score_correction_bias" if "bias" in name else name: (
        (1, 2) if "bias" in name else shape
    )
    for name, shape in DEEPSEEK_EXPERTS.items()
}
ERNIE_MTP = {
    "model.mtp_linear_proj.0.weight": (32, 64),
    "model.mtp_emb_norm.0.weight": (32,),
    "model.mtp_hidden_norm.0.weight": (32,),
}

HUNYUAN_CONFIG = {
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "first_k_dense_replace": 1,
    "head_dim": 6,
    "hidden_size": 32,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "num_attention_heads": 4,
    "num_experts": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 2,
    "qk_norm": True,
    "route_norm": True,
    "tie_word_embeddings": False,
    "vocab_size": 60,
}
HUNYUAN_ATTENTION = {name: s for name, s in GLM_ATTENTION.items() if not name.endswith("bias")}
HUNYUAN_EXPERTS = {
    "mlp.router.gate.weight": (2, 32),
    "mlp.expert_bias": (2,),
    "mlp.shared_mlp.gate_proj.weight": (40, 32),
    "mlp.shared_mlp.up_proj.weight": (40, 32),
    "mlp.shared_mlp.down_proj.weight": (32, 40),
    **{name: s for name, s in DEEPSEEK_EXPERTS.items() if ".experts." in name},
}
HUNYUAN_NEXTN = {
    "eh_proj.weight": (32, 64),
    "enorm.weight": (32,),
    "hnorm.weight": (32,),
    "final_layernorm.weight": (32,),
}

QWEN3_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "head_dim": 6,
    "hidden_size": 32,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "num_attention_heads": 4,
    "num_experts": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 60,
}
QWEN3_LAYER = {
    **HUNYUAN_ATTENTION,
    "mlp.gate.weight": (2, 32),
    **{name: s for name, s in DEEPSEEK_EXPERTS.items() if ".experts." in name},
}
QWEN3_MTP = {
    "fc.weight": (32, 64),
    "pre_fc_norm_embedding.weight": (32,),
    "pre_fc_norm_hidden.weight": (32,),
    "norm.weight": (32,),
}

Shapes = dict[str, tuple[int, ...]]
