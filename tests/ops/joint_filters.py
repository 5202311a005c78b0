"""The oracle of the joint filters (a float64 sort), random rows to ask it, and differences."""

import numpy as np
import torch
from kept_tokens import random_rows

ROUNDING = 1e-6


def filtered(logits, temperatures, top_ks, top_ps, min_ps):
    """(float64 probabilities, bool [rows]: rounding may decide otherwise)."""
    scaled = (logits / temperatures).double().numpy()
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probs = weights / weights.sum(axis=1, keepdims=True)
    order = np.argsort(-scaled, axis=1, kind="stable")  # the lower id first
    ordered = np.take_along_axis(probs, order, axis=1)
    before = ordered.cumsum(axis=1) - ordered
    top_p, floor = top_ps.double().numpy()[:, None], min_ps.double().numpy()[:, None]
    kept = np.arange(probs.shape[1]) < top_ks.numpy()[:, None]
    kept &= (before <= top_p) | (top_p >= 1)
    kept &= ordered >= floor * ordered[:, :1]
    near = (np.abs(before - top_p) < ROUNDING) & (top_p < 1)
    near |= (np.abs(ordered / ordered[:, :1] - floor) < ROUNDING) & (floor > 0) & (floor < 1)
    near &= np.arange(probs.shape[1]) < top_ks.numpy()[:, None]
    ordered = np.where(kept, ordered, 0.0)
    expected = np.zeros_like(probs)
    np.put_along_axis(expected, order, ordered / ordered.sum(axis=1, keepdims=True), axis=1)
    return expected, near.any(axis=1)


def rows_to_filter(num_rows: int, vocab_size: int, seed: int) -> tuple[torch.Tensor, ...]:
    logits, top_ks, top_ps = random_rows(num_rows, vocab_size, seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def one_of(choices: list[float]) -> torch.Tensor:
        return torch.tensor(choices)[torch.randint(len(choices), (num_rows,), generator=generator)]

    return logits, one_of([0.25, 0.7, 1.0, 2.0])[:, None], top_ks, top_ps, one_of([0, 0.053, 1.0])


def filter_differences(rule, *rows: torch.Tensor) -> tuple[int, int]:
    """(rows that differ from the oracle for no reason, rows that differ by rounding)."""
    expected, near = filtered(*rows)
    found = rule(*rows).double().numpy()
    differs = ((found > 0) != (expected > 0)).any(axis=1)
    # Of a probability above 1e-30 the bodies in fp32 miss 4e-6 at most, and 1e-6 above 1e-12;
    # below lies what fp32 flushes to zero. The bound is 2.5 times the largest that was seen.
    differs |= ~np.isclose(found, expected, rtol=1e-5, atol=1e-30).all(axis=1)
    return int((differs & ~near).sum()), int((differs & near).sum())
