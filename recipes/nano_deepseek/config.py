"""Owns the sizes of nano-deepseek and the `config.json` that transformers and SGLang read."""

from dataclasses import asdict, dataclass, field

from recipes.nano_deepseek.text.tokenizer import BOS_ID, END_ID, PAD_ID


@dataclass(frozen=True)
class YarnConfig:
    """YaRN (arXiv:2309.00071) as DeepSeek uses it; names are those of `rope_scaling`."""

    factor: float = 4.0
    original_max_position_embeddings: int = 1024
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.8  # unlike mscale, so that cos and sin are scaled and the error shows


@dataclass(frozen=True)
class NanoConfig:
    """Sizes of nano-deepseek; no two head dimensions or ranks are equal, so none can be swapped."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 640
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    q_lora_rank: int = 96
    kv_lora_rank: int = 88
    qk_nope_head_dim: int = 48
    qk_rope_head_dim: int = 32
    v_head_dim: int = 40
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 1.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 4096
    yarn: YarnConfig = field(default_factory=YarnConfig)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def to_checkpoint(self) -> dict:
        """`config.json`, with every field that SGLang 0.5.23 and transformers read."""
        sizes = asdict(self)
        yarn = sizes.pop("yarn")
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "torch_dtype": "bfloat16",
            **sizes,
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 1,
            "rope_scaling": {"type": "yarn", "rope_type": "yarn", **yarn},
            "rope_interleave": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "ep_size": 1,
            "pretraining_tp": 1,
            "aux_loss_alpha": 0.0,
            "seq_aux": True,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": BOS_ID,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
        }
