"""SGLang's unquantized experts and their choice on CPU, through ``ops``: its own loop over experts
repacks their weights in every call, and its choice is a compiled graph that is looked up each time.

A setting that is not computed here keeps SGLang's own.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.topk import TopK, build_precomputed_topk_output
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.utils import use_intel_amx_backend

from sglang_ascend.ops import experts as ops
from sglang_ascend.ops import layers


def multiply(self: UnquantizedFusedMoEMethod, layer: torch.nn.Module, dispatch_output: Any) -> Any:
    """SwiGLU of each row's experts, by the weights as SGLang loaded them."""
    if not multiplies_by_swiglu(self, layer):
        return self.forward_cpu(layer, dispatch_output)
    weights, ids = dispatch_output.topk_output[:2]
    gate_up, down = layer.w13_weight, layer.w2_weight
    rows, places, counts = ops.permute(
        dispatch_output.hidden_states, ids.int(), num_experts=len(gate_up)
    )
    inner = layers.swiglu(ops.grouped_matmul(rows, gate_up.mT, counts))
    copies = ops.grouped_matmul(inner, down.mT, counts)
    return StandardCombineInput(hidden_states=ops.unpermute(copies, weights, places))


def multiplies_by_swiglu(method: UnquantizedFusedMoEMethod, layer: Any) -> bool:
    """As ``multiply`` does, with all experts here."""
    config: Any = method.moe_runner_config
    return (
        config.activation == "silu"
        and config.is_gated
        and config.gemm1_alpha is None
        and config.swiglu_limit is None
        and not config.apply_router_weight_on_input
        and not method.with_bias
        and layer.num_local_experts == layer.num_experts
        and not use_intel_amx_backend(layer)
    )


def choose(
    self: TopK, hidden_states: torch.Tensor, router_logits: torch.Tensor, **others: Any
) -> Any:
    """DeepSeek-V3's choice: by sigmoid and bias, within the best groups."""
    config: Any = self.topk_config
    if not chooses_by_groups(self) or any(other is not None for other in others.values()):
        return self.forward_native(hidden_states, router_logits, **others)
    is_scaled = config.apply_routed_scaling_factor_on_output
    weights, ids = ops.gating(
        router_logits.float(),
        config.correction_bias.float(),
        num_experts_per_token=config.top_k,
        num_groups=config.num_expert_group,
        num_kept_groups=config.topk_group,
        scale=(config.routed_scaling_factor or 1.0) if is_scaled else 1.0,
    )
    return build_precomputed_topk_output(weights, ids, config, self.layer_id)


def chooses_by_groups(topk: TopK) -> bool:
    """As ``ops.experts.gating`` does, which knows of no expert that is simulated or has moved."""
    config: Any = topk.topk_config
    padding, moved_experts = topk.routing_inputs()
    return (
        config.use_grouped_topk
        and config.renormalize
        and config.custom_routing_function is None
        and config.num_shared_topk_slots == 0
        and config.correction_bias is not None
        and len(config.correction_bias) >= 2 * config.num_expert_group
        and padding is None
        and moved_experts is None
        and topk.waterfill_balancer is None
        and not envs.SGLANG_SIMULATE_UNIFORM_EXPERTS.get()
        and not envs.SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS.get()
    )


def flatten_router_biases(model: torch.nn.Module) -> None:
    """A bias [1, num_experts], as Ernie's, becomes [num_experts]: SGLang's model flattens it for
    the devices that it knows to need that, and its choice on ours adds it row by row."""
    for module in model.modules():
        if isinstance(module, TopK) and module.topk_config.correction_bias is not None:
            # A view: an update of weights writes in place.
            module.topk_config.correction_bias = module.topk_config.correction_bias.flatten()
