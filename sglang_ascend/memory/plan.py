"""Bytes of weights and of the KV cache on each rank, from config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from sglang_ascend.checkpoint.capabilities import EXCHANGE_ROWS
from sglang_ascend.checkpoint.config import ModelConfig
from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.layers import head_dim
from sglang_ascend.memory.held import rank_weights
from sglang_ascend.memory.weights import FLOAT_BYTES, Share, Weights

TOKEN_ID_BYTES = 8


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
        total_bytes: of the files of all weights, MTP layer included.
        token_bytes: of a token in the KV cache of a rank, MTP layer included, and of what is kept
            beside it for adaptive drafting.
        rank_bytes: of the weights on the rank that holds most, as this package's methods load them
            on an NPU; 0 if a server does not start.
        tokens: that fit into the KV caches of all attention groups; 0 if the weights do not fit.
        requests: of the context length, in all.
        decoded: by scheme, the linears of which a rank holds the values, for no operator of an NPU
            multiplies their codes.
        refused: why a server does not start, or nothing.
    """

    weights: str
    ranks: int
    attention_groups: int
    total_bytes: int
    token_bytes: int
    rank_bytes: int = 0
    tokens: int = 0
    requests: int = 0
    decoded: Mapping[str, list[str]] = field(default_factory=dict)
    refused: str = ""


def plan(config: ModelConfig, weights: Weights, deployment: Deployment) -> Plan:
    """
    Raises:
        CheckpointError: the heads are not divided evenly.
    """
    heads = config.size("num_attention_heads")
    if heads % deployment.attention_ranks:
        raise CheckpointError(
            f"{shown(config.path)} has {heads} attention heads, which {deployment.attention_ranks} "
            "ranks do not divide; change --ranks or --dp-size"
        )
    token = token_bytes(config, deployment)
    if deployment.adaptive:  # speculative.skipped.SkippedRows
        token += FLOAT_BYTES * config.size("hidden_size") + TOKEN_ID_BYTES
    one = Plan(
        weights.name,
        deployment.ranks,
        deployment.attention_groups,
        weights.total_bytes,
        token_bytes=token,
    )
    if refusal := _refusal(config, deployment):
        return replace(one, refused=refusal)
    divisors = _divisors(config, deployment)
    try:
        ranks = [rank_weights(weights, divisors, rank) for rank in range(deployment.ranks)]
    except ValueError as error:
        return replace(one, refused=str(error))
    fullest = max(ranks, key=lambda rank: rank.num_bytes)
    room = deployment.mem_fraction * deployment.device_bytes - fullest.num_bytes
    of_group = max(0, int(room // token))
    return replace(
        one,
        rank_bytes=fullest.num_bytes,
        decoded=fullest.decoded,
        tokens=of_group * deployment.attention_groups,
        requests=of_group // deployment.context_length * deployment.attention_groups,
    )


def _refusal(config: ModelConfig, deployment: Deployment) -> str:
    """Why a server with MTP does not start on NPUs whatever the weights, or nothing."""
    groups = deployment.attention_groups
    if groups == 1:
        return ""
    if config.architecture not in EXCHANGE_ROWS:
        return f"--dp-size is served with {', '.join(EXCHANGE_ROWS)} only: leave it out."
    if groups != deployment.ranks:
        return f"--dp-size {groups} is served on {groups} NPUs: pass --ranks {groups}."
    return ""


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
