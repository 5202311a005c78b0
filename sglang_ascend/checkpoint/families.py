"""Which model families have an MTP layer that SGLang serves, and where their tensors lie.

Adding a family is one row of FAMILIES, and one function in layers.py if its layer type is new.
Whether a model of a family can be served is another question: see capabilities.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from sglang_ascend.checkpoint import layers
from sglang_ascend.checkpoint.config import ModelConfig
from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.layers import Expected

MAX_LAYERS = 4096


@dataclass(frozen=True)
class Family:
    """One row of the table; n is num_hidden_layers.

    | architecture            | drafts as                   | MTP layer          | layer type    |
    |-------------------------|-----------------------------|--------------------|---------------|
    | MiMoForCausalLM         | MiMoMTP                     | model.mtp_layers.0 | Qwen2         |
    | DeepseekV3ForCausalLM   | DeepseekV3ForCausalLMNextN  | model.layers.{n}   | DeepSeek-V2   |
    | DeepseekV32ForCausalLM  | DeepseekV3ForCausalLMNextN  | model.layers.{n}   | DeepSeek-V2   |
    | Glm4MoeForCausalLM      | Glm4MoeForCausalLMNextN     | model.layers.{n}   | GLM-4 MoE     |
    | Glm4MoeLiteForCausalLM  | Glm4MoeLiteForCausalLMNextN | model.layers.{n}   | GLM-4.7 Flash |
    | Ernie4_5_MoeForCausalLM | Ernie4_5_MoeForCausalLMMTP  | model.mtp_block.0  | Ernie 4.5     |
    | HYV3ForCausalLM         | HYV3ForCausalLMNextN        | model.layers.{n}   | HunYuan V3    |
    | Qwen3MoeForCausalLM     | Qwen3MoeForCausalLMMTP      | mtp.layers.0       | Qwen3 MoE     |

    Source: configs/model_config.py of SGLang 0.5.23, and of its models/ mimo_mtp, deepseek_nextn,
    glm4_moe_nextn, glm4_moe_lite_nextn, ernie4_eagle, hunyuan_v3_nextn and qwen3_moe_mtp.
    DeepseekV2ForCausalLM is no row: SGLang has no NextN class for it and would load the whole model
    as its own draft.

    Attributes:
        architecture: the target's name in config.json.
        draft_architecture: the name of its MTP layer as a checkpoint of its own.
        model_types: the values of model_type that transformers builds without remote code.
        layer: the tensors of one decoder layer, without or with experts.
        is_sparse: which layers of the target have experts.
        mtp_is_sparse: whether the MTP layer has.
        mtp_prefix: what the names of the MTP layer's tensors begin with; {num_hidden_layers} is
            filled in, and the names below follow it.
        projection: [hidden_size, 2 * hidden_size], from embedding and hidden state together.
        norms: the MTP layer's own norms, [hidden_size] each.
        block: where the MTP layer's decoder layer lies.
        lone_is_layer_0: of a draft exported alone, which has one layer; otherwise it lies behind
            one that is not there.
    """

    architecture: str
    draft_architecture: str
    model_types: tuple[str, ...]
    layer: Callable[[ModelConfig, bool], Iterator[Expected]]
    is_sparse: Callable[[ModelConfig, int], bool]
    mtp_is_sparse: bool
    mtp_prefix: str
    projection: str
    norms: tuple[str, ...]
    block: str = ""
    lone_is_layer_0: bool = True


# NextN: the MTP layer is behind the last, has experts, and its parts have DeepSeek's names.
_next_n = partial(
    Family,
    mtp_is_sparse=True,
    mtp_prefix="model.layers.{num_hidden_layers}.",
    projection="eh_proj.weight",
    norms=("enorm", "hnorm", "shared_head.norm"),
)

FAMILIES = (
    Family(
        architecture="MiMoForCausalLM",
        draft_architecture="MiMoMTP",
        model_types=("qwen2",),
        layer=layers.qwen2_layer,
        is_sparse=layers.never_sparse,
        mtp_is_sparse=False,
        mtp_prefix="model.mtp_layers.0.",
        projection="input_proj.weight",
        norms=("token_layernorm", "hidden_layernorm", "final_layernorm"),
    ),
    *(
        _next_n(
            architecture=architecture,
            draft_architecture="DeepseekV3ForCausalLMNextN",
            model_types=("deepseek_v3", "deepseek_v32"),
            layer=layers.deepseek_layer,
            is_sparse=layers.deepseek_sparse,
        )
        for architecture in ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM")
    ),
    _next_n(
        architecture="Glm4MoeForCausalLM",
        draft_architecture="Glm4MoeForCausalLMNextN",
        model_types=("glm4_moe",),
        layer=layers.glm4_moe_layer,
        is_sparse=layers.sparse_behind_dense,
    ),
    _next_n(
        architecture="Glm4MoeLiteForCausalLM",
        draft_architecture="Glm4MoeLiteForCausalLMNextN",
        model_types=("glm4_moe_lite",),
        layer=layers.glm4_moe_lite_layer,
        is_sparse=layers.sparse_behind_dense,
    ),
    Family(
        architecture="Ernie4_5_MoeForCausalLM",
        draft_architecture="Ernie4_5_MoeForCausalLMMTP",
        model_types=("ernie4_5_moe",),
        layer=layers.ernie_layer,
        is_sparse=layers.ernie_sparse,
        mtp_is_sparse=False,
        mtp_prefix="model.mtp_",
        projection="linear_proj.0.weight",
        norms=("emb_norm.0", "hidden_norm.0"),
        block="block.0.",
    ),
    _next_n(
        architecture="HYV3ForCausalLM",
        draft_architecture="HYV3ForCausalLMNextN",
        model_types=("hy_v3",),
        layer=layers.hunyuan_v3_layer,
        is_sparse=layers.sparse_behind_dense,
        norms=("enorm", "hnorm", "final_layernorm"),
        lone_is_layer_0=False,
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        draft_architecture="Qwen3MoeForCausalLMMTP",
        model_types=("qwen3_moe",),
        layer=layers.qwen3_moe_layer,
        is_sparse=layers.always_sparse,
        mtp_is_sparse=True,
        mtp_prefix="mtp.",
        projection="fc.weight",
        norms=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
        block="layers.0.",
    ),
)


def find_family(config: ModelConfig) -> Family | None:
    """The row whose target or draft architecture config.json names, or None."""
    for family in FAMILIES:
        if config.architecture in (family.architecture, family.draft_architecture):
            return family
    return None


def mtp_prefix(family: Family, config: ModelConfig) -> str:
    """What the names of the MTP layer's tensors begin with, dot included."""
    num_layers = _num_layers(config)
    is_layer_0 = num_layers == 1 and family.lone_is_layer_0
    return family.mtp_prefix.format(num_hidden_layers=0 if is_layer_0 else num_layers)


def mtp_tensors(family: Family, config: ModelConfig) -> list[Expected]:
    """The tensors of the MTP layer by full name; embedding and head come from the target."""
    prefix, hidden = mtp_prefix(family, config), config.size("hidden_size")
    own = [Expected(family.projection, (hidden, 2 * hidden))]
    own += [Expected(f"{norm}.weight", (hidden,)) for norm in family.norms]
    block = family.layer(config, family.mtp_is_sparse)
    return [*(e.under(prefix) for e in own), *(e.under(prefix + family.block) for e in block)]


def target_tensors(family: Family, config: ModelConfig) -> Iterator[list[Expected]]:
    """The target's tensors by full name: first those outside its layers, then layer by layer."""
    hidden, vocabulary = config.size("hidden_size"), config.size("vocab_size")
    outside = [
        Expected("model.embed_tokens.weight", (vocabulary, hidden)),
        Expected("model.norm.weight", (hidden,)),
    ]
    if not config.flag("tie_word_embeddings"):
        outside.append(Expected("lm_head.weight", (vocabulary, hidden)))
    yield outside
    for layer in range(_num_layers(config)):
        expected = family.layer(config, family.is_sparse(config, layer))
        yield [e.under(f"model.layers.{layer}.") for e in expected]


def _num_layers(config: ModelConfig) -> int:
    num_layers = config.size("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise CheckpointError(
            f"{shown(config.path)} has num_hidden_layers = {num_layers}; set it to the number of "
            f"layers that the model was built with (at most {MAX_LAYERS})"
        )
    return num_layers
