"""Uniform numbers for random decisions: from a request's seed, or fresh."""

from __future__ import annotations

from enum import IntEnum

import torch

from sglang_ascend.ops import sampling


class Decision(IntEnum):
    """What a coin decides. Columns of the seeded hash beyond any token id, which plain seeded
    sampling hashes, so that no two decisions of a position share a coin."""

    DRAFT = 0xFFFFFF00
    ACCEPT = 0xFFFFFF01
    BONUS = 0xFFFFFF02


def toss(seeds: torch.Tensor | None, positions: torch.Tensor, decision: Decision) -> torch.Tensor:
    """float64 [rows], uniform in [0, 1). Does not synchronise.

    A seeded coin is a function of (seed, position, decision), so a request draws the same
    whatever it is batched with. A position is decided anew when an earlier draft was rejected;
    nothing emitted by then depended on its coins, so they are still as good as fresh.

    Args:
        seeds: int64 [rows], or None for fresh coins.
        positions: int [rows], of the token that is decided.
    """
    if seeds is None:
        return torch.rand(len(positions), dtype=torch.float64, device=positions.device)
    column = torch.full((1,), int(decision), dtype=torch.int64, device=positions.device)
    coins = sampling.murmur_hash32(seeds, positions, column)[:, 0].double() / 2**32
    # torch_npu casts to float32 for float64: a coin next to 1 is 1 there.
    return coins.clamp(max=1 - torch.finfo(coins.dtype).eps / 2)
