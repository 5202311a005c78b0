"""Random numbers for decisions: from a request's seed, or fresh."""

from __future__ import annotations

from enum import IntEnum

import torch

from sglang_ascend.ops import sampling

_MAX_HASH = 2**32 - 1


class Decision(IntEnum):
    """What a uniform number decides. Columns of the seeded hash beyond any token id, which plain
    seeded sampling hashes, so that no two decisions of a position share a number."""

    DRAFT = 0xFFFFFF00
    ACCEPT = 0xFFFFFF01
    BONUS = 0xFFFFFF02


def uniform(
    seeds: torch.Tensor | None, positions: torch.Tensor, decision: Decision
) -> torch.Tensor:
    """float64 [rows], uniform in [0, 1). Does not synchronise.

    A seeded number is a function of (seed, position, decision), so a request draws the same
    whatever it is batched with. A position is decided anew when an earlier draft was rejected;
    nothing emitted by then depended on its numbers, so they are still as good as fresh.

    Args:
        seeds: int64 [rows], or None for fresh numbers.
        positions: int [rows], of the token that is decided.
    """
    if seeds is None:
        return torch.rand(len(positions), dtype=torch.float64, device=positions.device)
    column = torch.full((1,), int(decision), dtype=torch.int64, device=positions.device)
    numbers = sampling.murmur_hash32(seeds, positions, column)[:, 0].double() / 2**32
    # torch_npu casts to float32 for float64: a number next to 1 is 1 there.
    return numbers.clamp(max=1 - torch.finfo(numbers.dtype).eps / 2)


def exponential(
    seeds: torch.Tensor | None, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """float32 [rows, vocab_size] from Exp(1), for ``sampling.sample``. Does not synchronise.

    Seeded noise is that of SGLang's ``multinomial_with_seed``, E_i = -log(u_i) with u_i the
    MurmurHash3 of (seed, position, i) over 2^32 - 1, in float32 for a device without float64.
    Rounded to float32, one u in 2^25 is 1 and its token wins whatever its weight: above 1/2 the
    logarithm is taken of the distance from 1, which float32 has exactly enough.

    Args:
        seeds: int64 [rows], or None for fresh noise.
        positions: int [rows], of the token that is decided.
    """
    if seeds is None:
        return torch.empty(len(positions), vocab_size, device=positions.device).exponential_()
    tokens = torch.arange(vocab_size, device=positions.device)
    hashes = sampling.murmur_hash32(seeds, positions, tokens)
    share, rest = hashes.float() / _MAX_HASH, (_MAX_HASH - hashes).float() / _MAX_HASH
    noise = torch.where(hashes < 2**31, -share.log(), -torch.log1p(-rest))
    # The largest hash would win whatever its weight: its noise is that of the next one.
    return noise.clamp(min=2.0**-32, max=torch.finfo(torch.float32).max)
