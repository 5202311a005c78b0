"""Definitions of rotary position embeddings (Su et al., arXiv 2104.09864)."""

from __future__ import annotations

import torch


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates column i with column i + dim/2 (the pairing of Llama, Qwen and MiMo).

        y = x * cos + [-x2, x1] * sin    with x = [x1, x2]

    Args:
        x: float [rows, heads, dim], dim even.
        cos, sin: [rows, dim], each half a copy of the other.

    Returns:
        [rows, heads, dim] in the dtype of ``x``, computed in float32. Does not synchronise.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos.float()[:, None] + turned * sin.float()[:, None]).to(x.dtype)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates column 2i with column 2i + 1 (DeepSeek's pairing); the halves come out apart.

    The result holds the even columns, then the odd ones: it is ``rotate_halves`` of the reordered
    input. Scores do not change as long as queries and keys are both left in that order.

    Shapes and dtypes as in ``rotate_halves``. Does not synchronise.
    """
    return rotate_halves(torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1), cos, sin)
