"""Which of SGLang's layers compute by what on a CPU."""

from __future__ import annotations

from types import MethodType

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding
from sglang.srt.models.deepseek_v2 import MoEGate

from sglang_ascend.plugin.cpu import experts
from sglang_ascend.plugin.cpu.layers import (
    PreparedHead,
    PreparedLinear,
    asks_for_another_dtype,
    project,
    rms_norm,
    rotate,
    rotate_latent,
    score,
    silu_and_mul,
)


def register_layers(platform_key: str) -> None:
    """In the slot that SGLang has for out-of-tree platforms."""
    for layer, forward in (
        (RMSNorm, rms_norm),
        (RotaryEmbedding, rotate),
        (DeepseekScalingRotaryEmbedding, rotate_latent),
        (SiluAndMul, silu_and_mul),
        (TopK, experts.choose),
        (UnquantizedFusedMoEMethod, experts.multiply),
    ):
        BaseFusedOp.register_oot_forward(layer, forward, platform_key)


def prepare_layers(model: torch.nn.Module) -> None:
    """Gives ``model``'s unquantized layers these methods; others keep theirs."""
    prepared: dict[type, type] = {UnquantizedLinearMethod: PreparedLinear}
    if not any(asks_for_another_dtype(module) for module in model.modules()):
        prepared[UnquantizedEmbeddingMethod] = PreparedHead
    for layer in model.modules():
        method = prepared.get(type(getattr(layer, "quant_method", None)))
        if method is not None:
            layer.quant_method = method()
        elif type(layer) is torch.nn.Linear:
            layer.forward = MethodType(project, layer)
        elif type(layer) is MoEGate:
            layer.forward = MethodType(score, layer)
