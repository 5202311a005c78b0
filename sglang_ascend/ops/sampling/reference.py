"""Definitions of the operators that turn logits into tokens."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row, the first of equals: [rows, vocab_size] -> int64 [rows].

    Does not synchronise.
    """
    return logits.argmax(dim=-1)


def filter_probs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """What temperature, top-k, top-p and min-p mean here, with speculation and without.

    With p = softmax(logits / temperature) and tokens in descending order of p, a token stays when
    all three hold, each judged on p itself (a joint filter; none sees what another removed):

        rank < top_k,    mass before it <= top_p,    p >= min_p * max p

    What stays is renormalised. Among equals the lower token id comes first. This is what SGLang's
    PyTorch sampler draws from; SGLang's verification filters in turn (top-p of what top-k left).

    Args:
        logits: float [rows, vocab_size].
        temperatures: float [rows, 1], above 0.
        top_ks: int [rows], at least 1.
        top_ps, min_ps: float [rows], in (0, 1] and [0, 1].

    Returns:
        float [rows, vocab_size], each row sums to 1. Does not synchronise.
    """
    probs = torch.softmax(logits / temperatures, dim=-1)
    ordered, tokens = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    before = ordered.cumsum(dim=-1) - ordered
    kept = (
        (ranks < top_ks[:, None])
        & (before <= top_ps[:, None])
        & (ordered >= min_ps[:, None] * ordered[:, :1])
    )
    ordered = torch.where(kept, ordered, 0.0)
    ordered /= ordered.sum(dim=-1, keepdim=True)
    return torch.empty_like(probs).scatter_(-1, tokens, ordered)


def sample(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Exponential sampling: argmax of weights[i] / noise[i], with noise[i] drawn from Exp(1).

    That is i with probability weights[i] / sum of weights: the least of exponential variables with
    these rates. The Gumbel trick is the same on logarithms. ``torch.multinomial`` would do, but
    stops the host on an NPU.

    Args:
        weights: float32 [rows, vocab_size], not negative, some positive; need not sum to 1.
        noise: float32 [rows, vocab_size], positive and finite.

    Returns:
        int64 [rows]; never a token of weight 0. Does not synchronise.
    """
    return (weights / noise).argmax(dim=-1)


def inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse transform sampling: the first token whose cumulative weight passes uniform's share.

    Args:
        weights: float [..., vocab_size], not negative, some positive; need not sum to 1.
        uniform: float64 [...], in [0, 1).

    Returns:
        int64 [...]; never a token of weight 0. Does not synchronise.
    """
    mass = weights.double().cumsum(dim=-1)
    # Next to 1 a share may round to the whole mass: the last token with a share then takes it.
    whole = mass[..., -1]
    share = torch.minimum(uniform * whole, torch.nextafter(whole, whole.new_zeros(())))
    return (mass <= share[..., None]).sum(dim=-1)


def murmur_hash32(
    seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 of (seed, position, column), as SGLang's seeded sampling defines it.

    Args:
        seeds: int64 or uint64 [rows]; the two halves are hashed one after the other.
        positions: int [rows].
        columns: int [columns], of which the low 32 bits are hashed.

    Returns:
        int64 [rows, columns] in 0..2^32 - 1. Does not synchronise.
    """
    seeds = seeds.to(torch.int64)
    state = _mix(torch.zeros_like(seeds), seeds & _MASK)
    state = _mix(state, (seeds >> 32) & _MASK)
    state = _mix(state, positions.to(torch.int64) & _MASK)
    # 16 is the length of the key in bytes.
    state = _mix(state[:, None], columns.to(torch.int64)[None] & _MASK) ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B & _MASK
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & _MASK
    return state ^ (state >> 16)


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _mix(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    key = _rotate_left((key * 0xCC9E2D51) & _MASK, 15) * 0x1B873593 & _MASK
    return (_rotate_left(state ^ key, 13) * 5 + 0xE6546B64) & _MASK
