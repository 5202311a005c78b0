"""Owns the trainable DeepSeek-V3 target (MLA, grouped top-k experts) in plain torch.

Module names are the checkpoint's, except that a layer's experts are stacked for speed.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.nano_deepseek.config import NanoConfig
from recipes.nano_deepseek.experts import GatedMLP, MixtureOfExperts, RMSNorm, linear


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN equation 22: the temperature that a context `factor` times longer asks for."""
    return 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config: NanoConfig) -> float:
    """1 / sqrt(qk_head_dim), times the square of YaRN's temperature."""
    mscale = yarn_mscale(config.yarn.factor, config.yarn.mscale_all_dim)
    return config.qk_head_dim**-0.5 * mscale**2


def rope_frequencies(config: NanoConfig) -> Tensor:
    """YaRN's frequencies, fp32 [qk_rope_head_dim / 2]: fast ones kept, slow ones divided."""
    yarn, dim = config.yarn, config.qk_rope_head_dim
    base = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def pair_that_turns(rotations: float) -> float:
        wavelengths = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return base * (1 - ramp) + base / yarn.factor * ramp


class MultiHeadLatentAttention(nn.Module):
    """MLA in its unabsorbed form (DeepSeek-V2, arXiv:2405.04434, equations 37 to 47)."""

    frequencies: Tensor

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config, heads = config, config.num_attention_heads
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(
            config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim
        )
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim)
        )
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size)
        yarn = config.yarn
        self.rope_scale = yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(
            yarn.factor, yarn.mscale_all_dim
        )
        self.scale = softmax_scale(config)
        self.register_buffer("frequencies", rope_frequencies(config), persistent=False)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate neighbouring pairs of [batch, heads, rows, rope dim]; positions int64 [rows]."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos() * self.rope_scale, angles.sin() * self.rope_scale
        even, odd = x[..., 0::2], x[..., 1::2]
        # The order of the dimensions after rotation is free: queries and keys share it.
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1).to(x.dtype)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, rows, hidden] -> rotated queries, keys and values [batch, heads, rows, dim]."""
        config, (batch, rows, _) = self.config, x.shape
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(batch, rows, heads, config.qk_head_dim).transpose(1, 2)
        q = torch.cat([q[..., :nope], self.rotate(q[..., nope:], positions)], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], -1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, rows, heads, -1)
        k_nope, v = kv.transpose(1, 2).split([nope, config.v_head_dim], -1)
        k_rope = self.rotate(k_rope[:, None], positions).expand(-1, heads, -1, -1)
        return q, torch.cat([k_nope, k_rope], -1), v

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.project(x, positions)
        # Equal head dimensions let torch take its fused kernel.
        padded = F.pad(v, (0, self.config.qk_head_dim - self.config.v_head_dim))
        out = F.scaled_dot_product_attention(q, k, padded, is_causal=True, scale=self.scale)
        return self.o_proj(out[..., : self.config.v_head_dim].transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward block; `dense` picks a plain MLP instead of experts."""

    def __init__(self, config: NanoConfig, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MultiHeadLatentAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = (
            GatedMLP(config.hidden_size, config.intermediate_size)
            if dense
            else MixtureOfExperts(config)
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekModel(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(
            DecoderLayer(config, dense=i < config.first_k_dense_replace)
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DeepseekForCausalLM(nn.Module):
    """The target: token ids [batch, rows] -> logits."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DeepseekModel(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, rows, vocabulary]."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, positions)
        return self.lm_head(self.model.norm(x))
