"""A Llama checkpoint by the names of Qwen2: the same decoder, whose q, k and v have biases of zero.

SGLang has an MTP layer for MiMo, which is Qwen2, and none for Llama.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.checkpoint.config import ModelConfig
from sglang_ascend.checkpoint.layers import head_dim

ARCHITECTURE = "LlamaForCausalLM"
# What Llama means where config.json is silent and Qwen2 means something else.
_DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_UNKNOWN = ("attention_bias", "mlp_bias", "pretraining_tp", "auto_map", "sliding_window")


def as_qwen2(config: ModelConfig) -> ModelConfig:
    """The config under which Qwen2 computes what this Llama does.

    Raises:
        CheckpointError: this Llama has biases or an activation that Qwen2 has not.
    """
    for name in ("attention_bias", "mlp_bias"):
        if config.flag(name):
            raise CheckpointError(
                f"{config.path} has {name} = true, which no MTP family of SGLang has; "
                "pass a Llama without it"
            )
    activation = config.fields.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(
            f"{config.path} has hidden_act = {activation!r}, and SGLang's MTP families have silu; "
            "pass a Llama with it"
        )
    fields = {name: value for name, value in config.fields.items() if name not in _UNKNOWN}
    if fields.get("head_dim", 0) is None:
        del fields["head_dim"]
    heads = {"num_key_value_heads": config.size("num_attention_heads")}
    fields = heads | _DEFAULTS | fields
    fields |= {"model_type": "qwen2", "use_sliding_window": False}
    return replace(config, fields=fields)


def zero_biases(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Name and length of each bias that the Qwen2 has and the Llama has not."""
    heads = config.size("num_attention_heads")
    sizes = {"q": heads, "k": config.size("num_key_value_heads")}
    sizes["v"] = sizes["k"]
    for layer in range(config.size("num_hidden_layers")):
        for name, count in sizes.items():
            yield f"model.layers.{layer}.self_attn.{name}_proj.bias", count * head_dim(config)


def zero_tensors(config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Those biases, as a checkpoint holds them."""
    return {name: torch.zeros(size, dtype=dtype) for name, size in zero_biases(config)}
