"""Names and shapes of the tensors in one decoder layer, per layer type, from config.json alone.

Linear weights are [out_features, in_features]; every name is relative to the layer's prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_ascend.checkpoint.config import ModelConfig
from sglang_ascend.checkpoint.errors import CheckpointError, shown

MAX_EXPERTS = 16_384
EXPERT = re.compile(r"\.experts\.\d+\.")  # in the name of an expert's tensor

# One tensor [num_experts, out_features, in_features] for all experts, as transformers 5 has them;
# SGLang reads it for DeepSeek.
FUSED_EXPERTS = {
    "gate_proj": "mlp.experts.gate_up_proj",
    "up_proj": "mlp.experts.gate_up_proj",
    "down_proj": "mlp.experts.down_proj",
}


@dataclass(frozen=True)
class Expected:
    """A tensor that SGLang's model class allocates.

    An optional one is checked only if present; `fused_into` names one that may stand in for it.
    """

    name: str
    shape: tuple[int, ...]
    optional: bool = False
    fused_into: str | None = None

    def under(self, prefix: str) -> Expected:
        """The same tensor by its full name; the prefix has its dot."""
        fused_into = None if self.fused_into is None else prefix + self.fused_into
        return Expected(prefix + self.name, self.shape, self.optional, fused_into)


@dataclass(frozen=True)
class ExpertNames:
    """What a layer type calls its experts: two fields of config.json, then parts of its MLP.

    `num_shared` is None where no experts are shared, `router_bias` where the router has none;
    `router_bias_rows` stand before the number of experts in the bias's shape.
    """

    num_experts: str
    num_shared: str | None
    router: str = "gate"
    router_bias: str | None = "gate.e_score_correction_bias"
    router_bias_rows: tuple[int, ...] = ()
    shared: str = "shared_experts"


DEEPSEEK = ExpertNames("n_routed_experts", "n_shared_experts")
ERNIE = ExpertNames(
    "moe_num_experts",
    "moe_num_shared_experts",
    router_bias="moe_statics.e_score_correction_bias",
    router_bias_rows=(1,),
)
HUNYUAN = ExpertNames(
    "num_experts",
    "num_shared_experts",
    router="router.gate",
    router_bias="expert_bias",
    shared="shared_mlp",
)
QWEN3 = ExpertNames("num_experts", num_shared=None, router_bias=None)


def qwen2_layer(config: ModelConfig, sparse: bool) -> Iterator[Expected]:
    """Qwen2DecoderLayer, which MiMo uses for its body and its MTP layer; it is never sparse.

    The three biases are required: SGLang always allocates them, and leaves a missing one as it
    finds the memory.
    """
    yield from _grouped_query_attention(config, biased=True)
    yield from _dense_mlp("mlp", config, config.size("intermediate_size"))
    yield from _layer_norms(config)


def deepseek_layer(config: ModelConfig, sparse: bool) -> Iterator[Expected]:
    """DeepseekV2DecoderLayer: latent attention (MLA), and a dense or an expert MLP."""
    yield from _latent_attention(config)
    experts = DEEPSEEK
    if sparse and config.text("topk_method") != "noaux_tc":
        experts = replace(DEEPSEEK, router_bias=None)
    yield from _mlp(config, experts if sparse else None, fusable=True)
    yield from _layer_norms(config)


def glm4_moe_lite_layer(config: ModelConfig, sparse: bool) -> Iterator[Expected]:
    """Glm4MoeLiteDecoderLayer: latent attention (MLA), and a dense or an expert MLP."""
    yield from _latent_attention(config)
    yield from _mlp(config, DEEPSEEK if sparse else None)
    yield from _layer_norms(config)


def glm4_moe_layer(config: ModelConfig, sparse: bool) -> Iterator[Expected]:
    """Glm4MoeDecoderLayer: grouped-query attention, and a dense or an expert MLP."""
    yield from _grouped_query_attention(config, biased=config.flag("attention_bias"))
    if config.flag("use_qk_norm"):
        yield from _head_norms(config)
    yield from _mlp(config, DEEPSEEK if sparse else None)
    yield from _layer_norms(config)


def ernie_layer(config: ModelConfig, sparse: bool) -> Iterator[Expected]:
    """Ernie4DecoderLayer: grouped-query attention, and a dense or an expert MLP.

    Raises:
        CheckpointError: the layers have biases, which SGLang's MLPs have not.
    """
    if config.flag("use_bias"):
        raise CheckpointError(
            f"{shown(config.path)} has use_bias = true, and SGLang serves the family without "
            "biases; pass a checkpoint without them"
        )
    yield from _grouped_query_attention(config, biased=False)
    yield from _mlp(config, ERNIE if sparse else None)
    yield from _layer_norms(config)


def hunyuan_v3_layer(config: ModelConfig, sparse: bool) -> Iterator[Expected]:
    """HYV3DecoderLayer: grouped-query attention, and a dense or an expert MLP.

    transformers' config has neither of the two fields: without the first SGLang's class stops, and
    without the second it leaves out the norms of q and k.
    """
    config.require("route_norm")
    flag = "use_qk_norm" if "use_qk_norm" in config.fields else "qk_norm"
    config.require(flag)
    yield from _grouped_query_attention(config, biased=False)
    if config.flag(flag):
        yield from _head_norms(config)
    yield from _mlp(config, HUNYUAN if sparse else None)
    yield from _layer_norms(config)


def qwen3_moe_layer(config: ModelConfig, sparse: bool) -> Iterator[Expected]:
    """Qwen3MoeDecoderLayer: grouped-query attention, and an expert MLP in every layer."""
    biased = config.flag("attention_bias")
    yield from _grouped_query_attention(config, biased)
    if biased:
        yield Expected("self_attn.o_proj.bias", (config.size("hidden_size"),))
    yield from _head_norms(config)
    yield from _mlp(config, QWEN3)
    yield from _layer_norms(config)


def never_sparse(config: ModelConfig, layer: int) -> bool:
    """Models without experts."""
    return False


def deepseek_sparse(config: ModelConfig, layer: int) -> bool:
    """The rule of DeepseekV2DecoderLayer._is_layer_sparse."""
    first, every = config.count("first_k_dense_replace"), config.size("moe_layer_freq")
    return layer >= first and layer % every == 0


def sparse_behind_dense(config: ModelConfig, layer: int) -> bool:
    """The rule of Glm4MoeDecoderLayer and HYV3DecoderLayer."""
    return layer >= config.count("first_k_dense_replace")


def ernie_sparse(config: ModelConfig, layer: int) -> bool:
    """The rule of Ernie4DecoderLayer; an end of -1 is the last layer (transformers' config)."""
    first, every = config.count("moe_layer_start_index"), config.size("moe_layer_interval")
    ends = config.fields.get("moe_layer_end_index") != -1
    last = config.count("moe_layer_end_index") if ends else config.size("num_hidden_layers") - 1
    return first <= layer <= last and (layer - first) % every == 0


def always_sparse(config: ModelConfig, layer: int) -> bool:
    """The rule of Qwen3MoeDecoderLayer, which knows no dense layers."""
    return True


def head_dim(config: ModelConfig) -> int:
    """Of one head of grouped-query attention."""
    explicit = config.optional_size("head_dim")
    return explicit or config.size("hidden_size") // config.size("num_attention_heads")


def _grouped_query_attention(config: ModelConfig, biased: bool) -> Iterator[Expected]:
    hidden, width = config.size("hidden_size"), head_dim(config)
    q_size = config.size("num_attention_heads") * width
    kv_size = config.size("num_key_value_heads") * width
    for projection, out_features in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        yield Expected(f"self_attn.{projection}.weight", (out_features, hidden))
        if biased:
            yield Expected(f"self_attn.{projection}.bias", (out_features,))
    yield Expected("self_attn.o_proj.weight", (hidden, q_size))


def _head_norms(config: ModelConfig) -> Iterator[Expected]:
    for norm in ("q_norm", "k_norm"):
        yield Expected(f"self_attn.{norm}.weight", (head_dim(config),))


def _latent_attention(config: ModelConfig) -> Iterator[Expected]:
    """MLA. The indexer of DeepSeek-V3.2 is optional: layers may share one."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    nope, rope = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    v_head_dim, kv_rank = config.size("v_head_dim"), config.size("kv_lora_rank")
    q_rank = config.nullable_count("q_lora_rank")
    if q_rank is None:
        yield Expected("self_attn.q_proj.weight", (heads * (nope + rope), hidden))
    else:
        yield Expected("self_attn.q_a_proj.weight", (q_rank, hidden))
        yield Expected("self_attn.q_a_layernorm.weight", (q_rank,))
        yield Expected("self_attn.q_b_proj.weight", (heads * (nope + rope), q_rank))
    yield Expected("self_attn.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden))
    yield Expected("self_attn.kv_a_layernorm.weight", (kv_rank,))
    yield Expected("self_attn.kv_b_proj.weight", (heads * (nope + v_head_dim), kv_rank))
    yield Expected("self_attn.o_proj.weight", (hidden, heads * v_head_dim))
    index_heads = config.optional_size("index_n_heads")
    if index_heads is not None and q_rank is not None:
        index_dim = config.size("index_head_dim")
        wq_shape = (index_heads * index_dim, q_rank)
        yield Expected("self_attn.indexer.wq_b.weight", wq_shape, optional=True)
        yield Expected("self_attn.indexer.wk.weight", (index_dim, hidden), optional=True)


def _dense_mlp(prefix: str, config: ModelConfig, intermediate: int) -> Iterator[Expected]:
    hidden = config.size("hidden_size")
    yield Expected(f"{prefix}.gate_proj.weight", (intermediate, hidden))
    yield Expected(f"{prefix}.up_proj.weight", (intermediate, hidden))
    yield Expected(f"{prefix}.down_proj.weight", (hidden, intermediate))


def _mlp(
    config: ModelConfig, experts: ExpertNames | None, fusable: bool = False
) -> Iterator[Expected]:
    """A dense one without `experts`."""
    if experts is None:
        yield from _dense_mlp("mlp", config, config.size("intermediate_size"))
    else:
        yield from _expert_mlp(config, experts, fusable)


def _expert_mlp(config: ModelConfig, names: ExpertNames, fusable: bool) -> Iterator[Expected]:
    """Router, routed experts, and the shared experts as one wide MLP."""
    hidden, intermediate = config.size("hidden_size"), config.size("moe_intermediate_size")
    num_experts = min(_num_experts(config, names), MAX_EXPERTS)
    yield Expected(f"mlp.{names.router}.weight", (num_experts, hidden))
    if names.router_bias is not None:
        yield Expected(f"mlp.{names.router_bias}", (*names.router_bias_rows, num_experts))
    for expert in range(num_experts):
        for weight in _dense_mlp(f"mlp.experts.{expert}", config, intermediate):
            fused_into = FUSED_EXPERTS[weight.name.split(".")[-2]] if fusable else None
            yield replace(weight, fused_into=fused_into)
    if fusable:
        gate_up_shape = (num_experts, 2 * intermediate, hidden)
        yield Expected(FUSED_EXPERTS["gate_proj"], gate_up_shape, optional=True)
        down_shape = (num_experts, hidden, intermediate)
        yield Expected(FUSED_EXPERTS["down_proj"], down_shape, optional=True)
    num_shared = config.nullable_count(names.num_shared) if names.num_shared else None
    if num_shared:
        yield from _dense_mlp(f"mlp.{names.shared}", config, num_shared * intermediate)


def _num_experts(config: ModelConfig, names: ExpertNames) -> int:
    """transformers 5 writes the field of some families by a name of its own."""
    own, common = names.num_experts, "num_local_experts"
    return config.size(common if own not in config.fields and common in config.fields else own)


def _layer_norms(config: ModelConfig) -> Iterator[Expected]:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Expected(f"{norm}.weight", (config.size("hidden_size"),))
