"""Definitions of a decoder layer's operators between its products."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension, computed in float32
    (Zhang and Sennrich, arXiv 1910.07467).

    Args:
        x: float [..., width].
        weight: [width] in the dtype of ``x``.

    Returns:
        [..., width] in the dtype of ``x``. Does not synchronise.
    """
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of ``x + residual``, and the sum itself: the next layer's residual.

    Shapes and dtypes as in ``rms_norm``; the sum is rounded to the dtype of ``x`` after the norm
    was taken of it. Does not synchronise.
    """
    total = x.float() + residual.float()
    inverse_rms = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    return (total * inverse_rms * weight.float()).to(x.dtype), total.to(x.dtype)


def rotate_neox(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates queries and keys to their positions, column i with column i + rotary_dim/2 (the
    pairing of GPT-NeoX, Llama, Qwen and MiMo; Su et al., arXiv 2104.09864).

        y = x * cos + [-x2, x1] * sin    with x = [x1, x2]

    Args:
        query, key: float [rows, heads, dim] and [rows, kv_heads, dim].
        positions: int64 [rows].
        cos_sin: [max_positions, rotary_dim], cosines before sines; columns of ``query`` and ``key``
            behind rotary_dim stay as they are.

    Returns:
        The two in their dtype, computed in float32, contiguous. Does not synchronise.
    """
    cos, sin = cos_sin[positions].float()[:, None].chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second, rest = x.float().tensor_split([cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(turned, dim=-1).to(x.dtype)

    return rotate(query), rotate(key)


def rotate_interleaved(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``rotate_neox``, but column 2i turns with column 2i + 1 (the pairing of GPT-J and
    DeepSeek); ``cos_sin`` may be of another dtype than ``query`` and ``key``."""
    cos, sin = cos_sin[positions].float()[:, None].chunk(2, dim=-1)
    width = 2 * cos.shape[-1]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., :width:2].float(), x[..., 1:width:2].float()
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((turned.flatten(-2), x[..., width:].float()), dim=-1).to(x.dtype)

    return rotate(query), rotate(key)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x = [gate, up]: float [..., 2 * width] -> [..., width], by way of float32
    (Shazeer, arXiv 2002.05202).

    Does not synchronise.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
