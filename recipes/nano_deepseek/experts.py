"""Owns nano-deepseek's feed-forward parts: norm, gated MLP, router and mixture of experts."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.nano_deepseek.config import NanoConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.6 / math.sqrt(inputs))
    return layer


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores, bias-corrected group-limited top-k (DeepSeek-V3, section 2.1.2)."""

    e_score_correction_bias: Tensor

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.n_routed_experts, config.hidden_size) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, hidden] -> weights fp32 and expert ids, both [rows, num_experts_per_tok]."""
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        choice = (scores + self.e_score_correction_bias).detach()
        grouped = choice.view(len(x), config.n_group, -1)
        best = grouped.topk(2, -1).values.sum(-1).topk(config.topk_group, -1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~kept[..., None], -math.inf).flatten(1)
        ids = choice.topk(config.num_experts_per_tok, -1).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.routed_scaling_factor, ids

    @torch.no_grad()
    def balance(self, load: Tensor, rate: float) -> None:
        """Move the bias towards equal load (auxiliary-loss-free balancing, arXiv:2408.15664)."""
        load = load.float()
        self.e_score_correction_bias += rate * torch.sign(load.mean() - load)


class MixtureOfExperts(nn.Module):
    """Routed experts, stacked, plus one shared expert; `load` counts the last call's rows."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config)
        self.experts_gate_up = nn.Parameter(
            torch.randn(config.n_routed_experts, 2, inner, hidden) * 0.6 / math.sqrt(hidden)
        )
        self.experts_down = nn.Parameter(
            torch.randn(config.n_routed_experts, hidden, inner) * 0.6 / math.sqrt(inner)
        )
        self.shared_experts = GatedMLP(hidden, inner * config.n_shared_experts)
        self.load = torch.zeros(config.n_routed_experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, ids = self.gate(flat)
        order = ids.flatten().argsort()
        self.load = torch.bincount(ids.flatten(), minlength=len(self.experts_down))
        rows = order // ids.shape[1]
        outputs = []
        for expert, inputs in enumerate(flat[rows].split(self.load.tolist())):
            gate, up = F.linear(inputs, self.experts_gate_up[expert].flatten(0, 1)).chunk(2, -1)
            outputs.append(F.linear(F.silu(gate) * up, self.experts_down[expert]))
        routed = torch.cat(outputs).float() * weights.flatten()[order, None]
        summed = torch.zeros_like(flat, dtype=torch.float32).index_add_(0, rows, routed)
        return (summed + self.shared_experts(flat)).view(x.shape)
