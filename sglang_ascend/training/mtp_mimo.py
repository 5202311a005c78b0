"""The trainable MTP layer of MiMo: one Qwen2 decoder layer behind a projection of two inputs.

Matches SGLang 0.5.23's `models/mimo_mtp.py` parameter by parameter; see `interface` for the slots.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from sglang_ascend.training.decoder import rotary, rotate
from sglang_ascend.training.export import checkpoint_tensors, layer_weights
from sglang_ascend.training.interface import ChainCache
from sglang_ascend.training.trainer import read_average

Tensor = torch.Tensor


@dataclass(frozen=True)
class MiMoConfig:
    """Dimensions of the layer: those of the target's own layers."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 100000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_dict(cls, config: dict) -> MiMoConfig:
        """Picks this class's fields from a `config.json`."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


class Attention(nn.Module):
    """Grouped-query attention over the chain cache; the q/k/v biases of Qwen2 are kept at zero."""

    def __init__(self, config: MiMoConfig) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, dim
        self.q_proj = nn.Linear(size, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: ChainCache) -> Tensor:
        """x [batch, slots, hidden_size] -> the same shape; cos, sin [slots, head_dim]."""
        batch, slots, _ = x.shape
        groups = (batch, slots, self.num_kv_heads, -1, self.head_dim)
        cos, sin = cos[:, None, None], sin[:, None, None]
        q = rotate(self.q_proj(x).view(groups), cos, sin) * self.head_dim**-0.5
        k = rotate(self.k_proj(x).view(groups), cos, sin)
        v = self.v_proj(x).view(groups)
        cache.steps.append((k, v))
        # softmax over `chain_mask`'s keys, without building the diagonal blocks:
        # the causal block of step 1, then one own key per later step.
        first_k, first_v = cache.steps[0]
        scores = torch.einsum("bsngd,btnod->bngst", q, first_k)
        future = torch.ones(slots, slots, dtype=torch.bool, device=x.device).triu(1)
        scores = [scores.masked_fill(future, float("-inf"))]
        for own_k, _ in cache.steps[1:]:
            scores.append((q * own_k).sum(-1).permute(0, 2, 3, 1)[..., None])
        weights = torch.cat(scores, -1).softmax(-1)
        out = torch.einsum("bngst,btnod->bsngd", weights[..., :slots], first_v)
        for index, (_, own_v) in enumerate(cache.steps[1:]):
            out = out + weights[..., slots + index].permute(0, 3, 1, 2)[..., None] * own_v
        return self.o_proj(out.reshape(batch, slots, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: MiMoConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MiMoMTP(nn.Module):
    """Implements `interface.MTPLayer`; parameter names are the checkpoint's."""

    def __init__(self, config: MiMoConfig) -> None:
        super().__init__()
        self.config = config
        norm = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = nn.RMSNorm(*norm)
        self.hidden_layernorm = nn.RMSNorm(*norm)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.input_layernorm = nn.RMSNorm(*norm)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(*norm)
        self.mlp = MLP(config)
        self.final_layernorm = nn.RMSNorm(*norm)

    def initialize(self, target_norm: Tensor, scale: float, generator: torch.Generator) -> None:
        """Matrices ~ N(0, 1/fan_in), residual outputs smaller; the last norm is `scale` times the
        target's, so that the frozen head starts near uniform instead of confidently wrong."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    std = parameter.shape[1] ** -0.5
                    std *= 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                    parameter.normal_(0.0, std, generator=generator)
            self.final_layernorm.weight.copy_(target_norm * scale)

    def forward(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, cache: ChainCache
    ) -> Tensor:
        """See `interface.MTPLayer.forward`."""
        # SGLang's layer drops the token at position 0 (mimo_mtp.py, "masking inputs").
        embeddings = embeddings * (positions != 0).to(embeddings.dtype)[:, None]
        pair = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embeddings)], -1)
        x = self.input_proj(pair)
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.final_layernorm(x)


def new_layer(folder: Path, seed: int, norm_scale: float = 0.3) -> tuple[MiMoMTP, Tensor]:
    """An initialized layer for the target in `folder`, and the target's fp32 embedding."""
    layer, weights = _empty_layer(folder)
    norm = weights["model.norm.weight"].float()
    layer.initialize(norm, norm_scale, torch.Generator().manual_seed(seed))
    return layer, weights["model.embed_tokens.weight"].float()


def load_layer(folder: Path, path: Path) -> tuple[MiMoMTP, Tensor]:
    """A trained layer from an exported file or a trainer's checkpoint, and the embedding.

    Weights pass through bf16 either way: that is what is served.
    """
    layer, weights = _empty_layer(folder)
    tensors = load_file(path)
    if any(name.startswith("average.") for name in tensors):
        tensors = checkpoint_tensors(read_average(path))
    layer.load_state_dict(layer_weights(tensors))
    return layer, weights["model.embed_tokens.weight"].float()


def _empty_layer(folder: Path) -> tuple[MiMoMTP, dict[str, Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    return MiMoMTP(MiMoConfig.from_dict(config)), load_file(folder / "model.safetensors")
