"""SGLang's experts over whatever weights a checkpoint brings."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import AscendTPCombineInput, StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.runtime_context import get_parallel

from sglang_ascend.ops import experts as ops
from sglang_ascend.ops import layers
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.quantization.linear import slice_of_rank
from sglang_ascend.quantization.product import GroupedProduct, prepare_grouped
from sglang_ascend.quantization.weight import QuantizedWeight, joined

GATE, DOWN, UP = "w1", "w2", "w3"


class QuantizedExperts(FusedMoEMethodBase):
    """Rows are grouped by expert and go through gate, up and down products of the groups."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.collected: dict[tuple[int, str], torch.Tensor] = {}
        self.gate_up: GroupedProduct | None = None
        self.down: GroupedProduct | None = None

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size = intermediate_size_per_partition
        for name in ("w13_weight", "w2_weight"):
            weight = torch.nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            weight.weight_loader = self.collect  # pyright: ignore[reportAttributeAccessIssue]
            layer.register_parameter(name, weight)

    def collect(
        self,
        param: torch.nn.Parameter,
        loaded: torch.Tensor,
        name: str,
        shard_id: str,
        expert_id: int,
    ) -> None:
        self.collected[expert_id, shard_id] = loaded

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        if moe_runner_config.activation != "silu":
            raise ValueError(
                f"{self.prefix}: quantized experts are served with SwiGLU, not "
                f"{moe_runner_config.activation}."
            )
        if moe_runner_config.apply_router_weight_on_input:
            raise ValueError(f"{self.prefix}: weights of the router on the input are not served.")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not self.collected and self.gate_up is not None:
            return  # an update of other layers
        wanted = [(e, shard) for e in range(self.num_experts) for shard in (GATE, UP, DOWN)]
        missing = [key for key in wanted if key not in self.collected]
        if missing:
            raise ValueError(f"{self.prefix} got no weight {missing[0]}; the checkpoint lacks it.")
        parallel = get_parallel()
        if parallel.moe_ep_size > 1:
            raise ValueError("quantized experts are served without expert parallelism: --ep-size 1")
        rank = parallel.moe_tp_rank, parallel.moe_tp_size

        def part(expert: int, shard: str) -> torch.Tensor | QuantizedWeight:
            num_rows, num_columns = self.intermediate_size, self.hidden_size
            if shard == DOWN:
                num_rows, num_columns = num_columns, num_rows
            tensor = self.collected[expert, shard]
            return slice_of_rank(self.prefix, tensor, num_rows, num_columns, rank).to(device)

        experts = range(self.num_experts)
        device: torch.device = layer.w13_weight.device  # pyright: ignore
        dtype: torch.dtype = layer.w13_weight.dtype  # pyright: ignore
        needs_body = device_profile().captures_step
        gate_up = [joined([part(e, GATE), part(e, UP)]) for e in experts]
        self.gate_up = prepare_grouped(gate_up, dtype, needs_body=needs_body)
        down = [part(e, DOWN) for e in experts]
        self.down = prepare_grouped(down, dtype, needs_body=needs_body)
        self.collected = {}

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> Any:
        x = dispatch_output.hidden_states
        if dispatch_output.format.is_ascend_tp():  # grouped by SGLang already
            output = self._products(x, dispatch_output.expert_tokens)
            return AscendTPCombineInput(hidden_states=output)
        weights, ids = dispatch_output.topk_output[:2]
        copies, places, counts = ops.permute(x, ids.int(), num_experts=self.num_experts)
        output = ops.unpermute(self._products(copies, counts), weights.to(x.dtype), places)
        return StandardCombineInput(hidden_states=output)

    def _products(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Of rows grouped by expert, ``counts[i]`` of expert i."""
        assert self.gate_up is not None and self.down is not None
        return self.down(layers.swiglu(self.gate_up(rows, counts)), counts)
