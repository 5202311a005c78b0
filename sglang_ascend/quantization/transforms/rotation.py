"""Rotation: x W^T = (x R)(W R)^T for an orthogonal R, which spreads a large channel over many."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(size: int, seed: int = 0) -> Tensor:
    """float64 [size, size]: O ⊗ H, with the widest Hadamard matrix H whose order divides `size`.

    O is orthogonal, of the odd factor that is left, drawn by `seed`; H's rows have random signs.
    """
    order = size & -size
    generator = torch.Generator().manual_seed(seed)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < order:
        hadamard = torch.cat([torch.cat([hadamard] * 2, 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (order, 1), generator=generator) * 2 - 1
    odd = torch.randn(size // order, size // order, generator=generator, dtype=torch.float64)
    return torch.kron(torch.linalg.qr(odd).Q.contiguous(), signs * hadamard / order**0.5)
