"""Matrix products with transpositions of their own, and the cast between storage formats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npu_emulation.goldens.registry import golden


@golden("npu::npu_transpose_batchmatmul")
def transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
) -> Tensor:
    """The product of the permuted operands [batch, M, K] and [batch, K, N], permuted by perm_y."""
    left = input.permute(*perm_x1) if perm_x1 else input
    right = weight.permute(*perm_x2) if perm_x2 else weight
    product = torch.matmul(left.float(), right.float()).to(input.dtype)
    return (product.permute(*perm_y) if perm_y else product).contiguous()


@golden("npu::npu_format_cast")
def format_cast(input: Tensor, acl_format: int) -> Tensor:
    """The same values: every format is kept as ND here."""
    return input.clone()
