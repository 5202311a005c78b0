"""Look-up tables: each row has numbers of its own, by weighted k-means (SqueezeLLM, 2306.07629)."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 30


def kmeans(weight: Tensor, bits: int, importance: Tensor) -> tuple[Tensor, Tensor]:
    """(codes uint8 [out, in], tables float16 [out, 2^bits]) with a small weighted squared error.

    Lloyd's steps in float64 from evenly spread quantiles of each row; ties to the lower code.

    Args:
        weight: float [out, in]; importance: [in], at least 0.
    """
    values, shares = weight.double(), importance.double().clamp_min(1e-12)[None].expand_as(weight)
    places = (torch.arange(1 << bits, dtype=torch.float64) + 0.5) / (1 << bits)
    tables = torch.quantile(values, places, dim=1).T.contiguous()
    for _ in range(STEPS):
        codes = _nearest(values, tables)
        mass = torch.zeros_like(tables).scatter_add_(1, codes, shares)
        total = torch.zeros_like(tables).scatter_add_(1, codes, shares * values)
        tables = torch.where(mass > 0, total / mass, tables)
    stored = tables.half()
    return _nearest(values, stored.double()).to(torch.uint8), stored


def decoded(codes: Tensor, tables: Tensor) -> Tensor:
    """float32 [out, in]"""
    return tables.float().gather(1, codes.long())


def _nearest(values: Tensor, tables: Tensor) -> Tensor:
    return (values[..., None] - tables[:, None]).abs().argmin(-1)
