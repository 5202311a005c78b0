"""SGLang's unquantized linears and heads on CPU, through ``ops.linear`` and its packed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sglang_ascend.ops import linear as ops
from sglang_ascend.ops.linear.reference import PreparedWeight

_PREPARED: WeakKeyDictionary[torch.nn.Module, PreparedWeight] = WeakKeyDictionary()


def prepared_weight(layer: torch.nn.Module) -> PreparedWeight:
    """What ``ops.linear`` made of the layer's weight: at its first use, and after a new weight."""
    prepared = _PREPARED.get(layer)
    if prepared is None or prepared.dense is not layer.weight:
        prepared = _PREPARED[layer] = ops.prepare(layer.weight)
    return prepared


def forget_prepared_weights() -> None:
    """To be called when weights were changed in place."""
    _PREPARED.clear()


def apply_linear(
    self: Any,
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``UnquantizedLinearMethod.apply``."""
    return ops.linear(x, prepared_weight(layer), bias)


def compute_lm_head(
    original: Callable[..., torch.Tensor],
    self: Any,
    hidden_states: torch.Tensor,
    lm_head: torch.nn.Module,
    embedding_bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``LogitsProcessor._compute_lm_head``: a plain head in its own dtype, else the original."""
    from sglang.srt.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = type(getattr(lm_head, "quant_method", None)) is UnquantizedEmbeddingMethod
    if (
        not plain
        or hasattr(lm_head, "apply_lora")
        or self.use_fp32_lm_head
        or self.rl_on_policy_target is not None
        or hidden_states.dtype != lm_head.weight.dtype
    ):
        return original(self, hidden_states, lm_head, embedding_bias, out=out)
    return ops.linear(hidden_states, prepared_weight(lm_head))
