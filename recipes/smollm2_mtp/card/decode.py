"""A tied Llama decoding one token a row and step, by no module and no host value: a step can be
captured in a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from sglang_ascend.ops.attention import paged_gqa

Tensor = torch.Tensor
Attend = Callable[..., Tensor]  # `paged` or `masked`


class Weights:
    """A target's matrices as a step multiplies them: q, k and v joined, gate and up joined.

    Biases are left out: SmolLM2 has none, and its folder's are zeros for Qwen2's sake.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        config: dict,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        def joined(layer: int, *names: str) -> Tensor:
            parts = [tensors[f"model.layers.{layer}.{name}.weight"] for name in names]
            return torch.cat(parts).to(device, dtype)

        attention, mlp = "self_attn.", "mlp."
        self.config = config
        self.head_dim = config["hidden_size"] // config["num_attention_heads"]
        self.embedding = tensors["model.embed_tokens.weight"].to(device, dtype)
        self.final_norm = tensors["model.norm.weight"].to(device, dtype)
        self.layers = [
            (
                joined(layer, "input_layernorm"),
                joined(layer, *(f"{attention}{part}_proj" for part in "qkv")),
                joined(layer, f"{attention}o_proj"),
                joined(layer, "post_attention_layernorm"),
                joined(layer, f"{mlp}gate_proj", f"{mlp}up_proj"),
                joined(layer, f"{mlp}down_proj"),
            )
            for layer in range(config["num_hidden_layers"])
        ]


class CardDecoder:
    """Rows of at most `max_length` tokens; row r attends to its own positions up to its newest."""

    def __init__(self, weights: Weights, rows: int, max_length: int) -> None:
        self.weights, config = weights, weights.config
        device = weights.embedding.device
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.max_length = max_length
        slots, dim, dtype = rows * max_length, weights.head_dim, weights.embedding.dtype
        shape = (config["num_hidden_layers"], 2, slots, self.kv_heads, dim)
        self.cache = torch.zeros(shape, dtype=dtype, device=device)
        self.rows = torch.arange(rows, device=device)
        powers = torch.arange(0, dim, 2, device=device).float() / dim
        angles = torch.arange(max_length, device=device)[:, None] / config["rope_theta"] ** powers
        self.rotations = torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2).to(dtype)
        self.attend: Attend = paged

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feeds int64 `tokens` [rows] at `positions` [rows]; the hidden states after the final norm
        [rows, hidden_size]. It does not synchronise."""
        norm, weights = partial(self._norm, eps=self.weights.config["rms_norm_eps"]), self.weights
        cos, sin = (table[positions][:, None] for table in self.rotations)
        slots = self.rows * self.max_length + positions
        sizes = [self.heads + self.kv_heads, self.kv_heads]
        x = weights.embedding[tokens]
        for (before, qkv, out, after, gate_up, down), (keys, values) in zip(
            weights.layers, self.cache, strict=True
        ):
            heads = F.linear(norm(x, before), qkv).view(len(x), -1, weights.head_dim)
            rotated, value = heads.split(sizes, dim=1)
            half = weights.head_dim // 2
            turned = torch.cat((-rotated[..., half:], rotated[..., :half]), -1)
            rotated = rotated * cos + turned * sin
            keys.index_copy_(0, slots, rotated[:, self.heads :])
            values.index_copy_(0, slots, value)
            query = rotated[:, : self.heads].contiguous()
            x = x + F.linear(self.attend(self, query, keys, values, positions + 1).flatten(1), out)
            gate, up = F.linear(norm(x, after), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return norm(x, weights.final_norm)

    @staticmethod
    def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)


def paged(
    decoder: CardDecoder, query: Tensor, keys: Tensor, values: Tensor, kv_lens: Tensor
) -> Tensor:
    """Attention by this package's operator, each row a page: it reads what a row has."""
    return paged_gqa(
        query,
        keys,
        values,
        decoder.rows[:, None],
        kv_lens,
        query_len=1,
        page_size=decoder.max_length,
        scale=query.shape[-1] ** -0.5,
    )


def masked(
    decoder: CardDecoder, query: Tensor, keys: Tensor, values: Tensor, kv_lens: Tensor
) -> Tensor:
    """The same by PyTorch, which reads every row to its end."""
    rows, dim = len(query), query.shape[-1]
    shape = (rows, decoder.max_length, decoder.kv_heads, dim)
    mask = torch.arange(decoder.max_length, device=query.device) < kv_lens[:, None, None, None]
    folded = query.view(rows, decoder.kv_heads, -1, dim)
    key, value = (cache.view(shape).transpose(1, 2) for cache in (keys, values))
    mask = mask.expand(-1, 1, folded.shape[2], -1)
    return F.scaled_dot_product_attention(folded, key, value, mask).reshape(rows, -1, dim)
