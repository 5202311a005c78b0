"""Owns the trainable DeepSeek-V3 target (MLA, grouped top-k experts) in plain torch.

Module names are the checkpoint's, except that a layer's experts are stacked for speed.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_ascend.training.nano_config import NanoConfig
from sglang_ascend.training.nano_experts import GatedMLP, MixtureOfExperts, RMSNorm, linear


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


class KeyValueCache:
    """The keys and values that one layer has seen, for generation."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append [batch, heads, new, dim] along the third axis and return all of them."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], 2)
            values = torch.cat([self.values, values], 2)
        self.keys, self.values = keys, values
        return keys, values


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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention and output projection; without a mask, causal unless there is one row."""
        # Equal head dimensions let torch take its fused kernel.
        padded = F.pad(v, (0, self.config.qk_head_dim - self.config.v_head_dim))
        causal = mask is None and q.shape[2] > 1
        out = F.scaled_dot_product_attention(
            q, k, padded, mask, is_causal=causal, scale=self.scale
        )[..., : self.config.v_head_dim]
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, positions: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        q, k, v = self.project(x, positions)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.attend(q, k, v, None)


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

    def forward(self, x: Tensor, positions: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekModel(nn.Module):
    """Embedding, layers and the final norm; its output is what SGLang hands to the NextN layer."""

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
    """The target: token ids [batch, rows] -> hidden states after the final norm -> logits."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DeepseekModel(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)

    def hidden_states(
        self, ids: Tensor, start: int = 0, caches: list[KeyValueCache] | None = None
    ) -> Tensor:
        """Final-norm hidden states [batch, rows, hidden] of `ids` at positions from `start` on."""
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        x = self.model.embed_tokens(ids)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, positions, caches[index] if caches is not None else None)
        return self.model.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, rows, vocabulary]."""
        return self.lm_head(self.hidden_states(ids))
