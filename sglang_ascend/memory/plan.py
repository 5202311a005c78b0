"""Bytes of weights and of the KV cache on each rank, from config.json alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, prod

from sglang_ascend.checkpoint.config import ModelConfig
from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.families import Family, find_family, mtp_tensors, target_tensors
from sglang_ascend.checkpoint.layers import FUSED_EXPERTS, Expected, head_dim
from sglang_ascend.quantization.qconfig import QConfig, layout_of
from sglang_ascend.quantization.recipe import Recipe, read_recipe
from sglang_ascend.quantization.weight import HEAD

FLOAT = "bf16"
FLOAT_BYTES, ZERO_BYTES, TOKEN_ID_BYTES = 2, 4, 8
FLOAT32_NAMES = ("e_score_correction_bias", "expert_bias")
# Linears of which every rank has all, and which stay float: the router (MoEGate or ReplicatedLinear
# in SGLang's models) and the projection of the MTP layer.
FLOAT_LINEARS = (
    "mlp.gate",
    "mlp.router.gate",
    "eh_proj",
    "input_proj",
    "mtp_linear_proj.0",
    "mtp.fc",
)
COPIED = (*FLOAT_LINEARS, "q_a_proj", "kv_a_proj_with_mqa")


class Share(StrEnum):
    """By what a tensor is divided."""

    WHOLE = "whole"
    HEADS = "heads"  # ranks of one attention group
    KEY_VALUE_HEADS = "key-value heads"  # the same, but no further than there are such heads
    RANKS = "ranks"
    VOCABULARY = "vocabulary"  # as heads; all ranks where attention has one group


@dataclass(frozen=True)
class Deployment:
    """Ranks of one device each.

    Attributes:
        ranks: `--tp-size`.
        attention_groups: `--dp-size` with `--enable-dp-attention --enable-dp-lm-head`, or 1.
        device_bytes: memory of one device.
        mem_fraction: `--mem-fraction-static`, what weights and KV cache may take of it.
        context_length: tokens of a request.
        adaptive: `--speculative-adaptive`, which keeps the target's hidden state of each token.

    Raises:
        ValueError: groups do not divide the ranks.
    """

    ranks: int
    attention_groups: int = 1
    device_bytes: int = 64 << 30
    mem_fraction: float = 0.8
    context_length: int = 8192
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.ranks % self.attention_groups:
            raise ValueError(
                f"--dp-size {self.attention_groups} does not divide --ranks {self.ranks}."
            )

    @property
    def attention_ranks(self) -> int:
        """That share the heads of a request."""
        return self.ranks // self.attention_groups


@dataclass(frozen=True)
class Plan:
    """One deployment of one kind of weights.

    Attributes:
        weights: `bf16`, or a recipe's name.
        total_bytes: of all weights, MTP layer included, once.
        rank_bytes: of the weights on each rank.
        token_bytes: of a token in the KV cache of a rank, MTP layer included, and of what is kept
            beside it for adaptive drafting.
        tokens: that fit into the KV caches of all attention groups; 0 if the weights do not fit.
        requests: of the context length, in all.
    """

    weights: str
    ranks: int
    attention_groups: int
    total_bytes: int
    rank_bytes: int
    token_bytes: int
    tokens: int
    requests: int


def plan(config: ModelConfig, weights: str, deployment: Deployment) -> Plan:
    """
    Raises:
        CheckpointError: the model is of no served family, or its heads are not divided evenly.
        RecipeError: `weights` is neither `bf16` nor a recipe.
    """
    family = _family(config)
    heads = config.size("num_attention_heads")
    if heads % deployment.attention_ranks:
        raise CheckpointError(
            f"{shown(config.path)} has {heads} attention heads, which {deployment.attention_ranks} "
            "ranks do not divide; change --ranks or --dp-size"
        )
    recipe = None if weights == FLOAT else read_recipe(weights)
    divisors, least_bits = _divisors(config, deployment), _least_bits(recipe)
    total = rank = 0
    for tensor in tensors(family, config):
        size = num_bytes(tensor, recipe, least_bits)
        total += size
        rank += ceil(size / divisors[share_of(tensor.name)])
    token = token_bytes(config, deployment)
    if deployment.adaptive:  # speculative.skipped.SkippedRows
        token += FLOAT_BYTES * config.size("hidden_size") + TOKEN_ID_BYTES
    room = deployment.mem_fraction * deployment.device_bytes - rank
    of_group = max(0, int(room // token))
    return Plan(
        weights,
        deployment.ranks,
        deployment.attention_groups,
        total,
        rank,
        token,
        of_group * deployment.attention_groups,
        of_group // deployment.context_length * deployment.attention_groups,
    )


def tensors(family: Family, config: ModelConfig) -> Iterator[Expected]:
    """All that a complete checkpoint holds; experts one by one."""
    fused = tuple(FUSED_EXPERTS.values())
    for part in (*target_tensors(family, config), mtp_tensors(family, config)):
        yield from (tensor for tensor in part if not tensor.name.endswith(fused))


def _least_bits(recipe: Recipe | None) -> int:
    """Of a code of a weight-only integer: two lie in a byte, or one, as in ModelSlim's files."""
    schemes = [] if recipe is None else [rule.qconfig for rule in recipe.rules]
    return 4 if layout_of(schemes) == "compressed-tensors" else 8


def num_bytes(tensor: Expected, recipe: Recipe | None, least_bits: int) -> int:
    """Of one tensor, in bf16 where the recipe leaves it float."""
    scheme = None if recipe is None else _scheme(tensor, recipe)
    count = prod(tensor.shape)
    if recipe is None or scheme is None:
        return count * (4 if tensor.name.endswith(FLOAT32_NAMES) else FLOAT_BYTES)
    rows, columns = tensor.shape
    form, grid = scheme.weight.number_format, scheme.weight.grid
    is_weight_only = form.is_integer and scheme.act is None
    bits = max(form.bits, least_bits) if is_weight_only else form.bits
    block_rows, block_columns = grid.block[0] or rows, grid.block[1] or columns
    scales = ceil(rows / block_rows) * ceil(columns / block_columns)
    packed = ceil((count * bits + scales * form.scale_bits) / 8)
    return packed + (0 if grid.symmetric else scales * ZERO_BYTES)


def _scheme(tensor: Expected, recipe: Recipe) -> QConfig | None:
    module, _, kind = tensor.name.rpartition(".")
    if kind != "weight" or len(tensor.shape) != 2 or module.endswith(FLOAT_LINEARS):
        return None
    if module == HEAD:
        return recipe.head_scheme
    if ".embed_tokens" in module:
        return None
    scheme = recipe.scheme(module)
    return scheme and scheme.fitting(tensor.shape[1])


def share_of(name: str) -> Share:
    """How SGLang's ranks share the tensor `name`."""
    module, _, _ = name.rpartition(".")
    if module in (HEAD, "model.embed_tokens"):
        return Share.VOCABULARY
    if name.endswith(FLOAT32_NAMES) or module.endswith(COPIED):
        return Share.WHOLE
    if "norm" in module or ".indexer." in name:
        return Share.WHOLE
    if module.endswith(("self_attn.k_proj", "self_attn.v_proj")):
        return Share.KEY_VALUE_HEADS
    if ".self_attn." in name:
        return Share.HEADS
    return Share.RANKS if ".mlp." in name else Share.WHOLE


def token_bytes(config: ModelConfig, deployment: Deployment) -> int:
    """Of one token in the bf16 KV cache of one rank, MTP layer included."""
    layers = config.size("num_hidden_layers") + 1
    if "kv_lora_rank" in config.fields:  # one latent for all heads, on every rank
        return (
            FLOAT_BYTES * layers * (config.size("kv_lora_rank") + config.size("qk_rope_head_dim"))
        )
    kv_heads = config.size("num_key_value_heads")
    of_rank = ceil(kv_heads / deployment.attention_ranks)
    return FLOAT_BYTES * layers * 2 * of_rank * head_dim(config)


def _divisors(config: ModelConfig, deployment: Deployment) -> dict[Share, int]:
    heads = deployment.attention_ranks
    kv_heads = config.fields.get("num_key_value_heads", heads)
    return {
        Share.WHOLE: 1,
        Share.HEADS: heads,
        Share.KEY_VALUE_HEADS: min(heads, kv_heads),
        Share.RANKS: deployment.ranks,
        Share.VOCABULARY: heads,
    }


def _family(config: ModelConfig) -> Family:
    family = find_family(config)
    if family is None:
        raise CheckpointError(
            f"{shown(config.path)} is of {shown(config.architecture)}, of which this package does "
            "not know the tensors; docs/features.md lists the families"
        )
    return family
