"""A compact Qwen2/Llama decoder for self-generation: one token per row and step, static KV cache.

Owns the forward pass only; `generate` decides what each row decodes.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the split-half rotary embedding, each [*positions.shape, head_dim]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = positions[..., None].double() * theta**-exponents
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary cos/sin (broadcastable to x) to the split halves of x's last dimension."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Decoder:
    """The target in fp32 with room for `rows` sequences of at most `max_length` tokens.

    Source: transformers' Qwen2 and Llama (equal here: the q/k/v biases are zero or absent).
    """

    def __init__(self, folder: Path, rows: int, max_length: int) -> None:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self.num_layers = config["num_hidden_layers"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.head_dim = config["hidden_size"] // self.num_heads
        self.eps = config["rms_norm_eps"]
        self.embedding = weights["model.embed_tokens.weight"].float()
        self.norm = weights["model.norm.weight"].float()
        self.layers = [self._layer(weights, i) for i in range(self.num_layers)]
        positions = torch.arange(max_length)
        cos, sin = rotary(positions, self.head_dim, config["rope_theta"])
        self.cos, self.sin = cos.float(), sin.float()
        shape = (self.num_layers, 2, rows, self.num_kv_heads, max_length, self.head_dim)
        self.cache = torch.zeros(shape)

    @staticmethod
    def _layer(weights: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{index}."

        def joined(*names: str) -> Tensor:
            return torch.cat([weights[prefix + name].float() for name in names])

        return {
            "input_norm": joined("input_layernorm.weight"),
            "qkv": joined(*(f"self_attn.{p}_proj.weight" for p in "qkv")),
            "out": joined("self_attn.o_proj.weight"),
            "post_norm": joined("post_attention_layernorm.weight"),
            "gate_up": joined("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            "down": joined("mlp.down_proj.weight"),
        }

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feeds `tokens` [rows] at `positions` [rows]; returns the hidden after the final norm.

        Row r attends to its own cached positions 0..positions[r].
        """
        length = int(positions.max()) + 1
        mask = (torch.arange(length) <= positions[:, None])[:, None, None]  # [rows, 1, 1, length]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            x = x + self._attention(layer, index, x, positions, mask, cos, sin)
            gate_up = F.linear(rms_norm(x, layer["post_norm"], self.eps), layer["gate_up"])
            gate, up = gate_up.chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return rms_norm(x, self.norm, self.eps)

    def _attention(
        self,
        layer: dict[str, Tensor],
        index: int,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        rows, kv_heads, dim = len(x), self.num_kv_heads, self.head_dim
        qkv = F.linear(rms_norm(x, layer["input_norm"], self.eps), layer["qkv"])
        qkv = qkv.view(rows, -1, dim)
        q, k, v = qkv.split([self.num_heads, kv_heads, kv_heads], 1)
        keys, values = self.cache[index]
        every = torch.arange(rows)
        keys[every, :, positions] = rotate(k, cos, sin)
        values[every, :, positions] = v
        # The query heads that share a KV head are that head's query rows.
        q = rotate(q, cos, sin).view(rows, kv_heads, -1, dim)
        length = mask.shape[-1]
        out = F.scaled_dot_product_attention(q, keys[:, :, :length], values[:, :, :length], mask)
        return F.linear(out.reshape(rows, -1), layer["out"])

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] of `hidden` [rows, hidden_size] through the tied head."""
        return F.linear(hidden, self.embedding)

    def share_prefix(self, length: int) -> None:
        """Copies row 0's first `length` cached positions to every row."""
        self.cache[:, :, :, :, :length] = self.cache[:, :, :1, :, :length]
