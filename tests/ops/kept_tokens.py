"""The oracle of top-k and top-p, random rows to ask it about, and what an implementation keeps."""

import numpy as np
import torch

from sglang_ascend.ops import sampling
from sglang_ascend.ops.sampling.threshold import Kept

NO_TOP_K = 1 << 30


def shares_from_below(logits: np.ndarray, top_ks: np.ndarray, joint: bool):
    """(ascending values, which top-k left, the share of each and all below it in what it left).

    Joint: the share in the whole row.
    """
    values = np.sort(logits.astype(np.float64), axis=1)
    places = values.shape[1] - np.minimum(top_ks, values.shape[1])
    left = (values >= np.take_along_axis(values, places[:, None], axis=1)) & (values > -np.inf)
    weights = np.where(left | joint, np.exp(values - values[:, -1:]), 0.0)
    return values, left, weights.cumsum(axis=1) / weights.sum(axis=1, keepdims=True)


def kept_by_sorting(
    logits: np.ndarray, top_ks: np.ndarray, top_ps: np.ndarray, joint: bool = False
) -> np.ndarray:
    """bool [rows, vocab_size]"""
    values, left, shares = shares_from_below(logits, top_ks, joint)
    p = top_ps.astype(np.float64)[:, None]
    kept = left & ((shares > 1 - p) | (p >= 1))
    kept[:, -1] = True
    lowest = np.where(kept, values, np.inf).min(axis=1, keepdims=True)
    return (logits >= lowest) & (logits > -np.inf)


def near_the_boundary(
    logits: np.ndarray, top_ks: np.ndarray, top_ps: np.ndarray, joint: bool = False
) -> np.ndarray:
    """bool [rows]: equal values cross together, so only the last of them counts."""
    values, left, shares = shares_from_below(logits, top_ks, joint)
    last = np.append(values[:, 1:] != values[:, :-1], np.ones((len(values), 1), bool), axis=1)
    distances = np.abs(shares - (1 - top_ps.astype(np.float64)[:, None]))
    return np.where(left & last, distances, 1.0).min(axis=1) < 1e-6


def tokens_kept(logits: torch.Tensor, kept: Kept) -> np.ndarray:
    """bool [rows, vocab_size], by the rule that ``Kept`` states."""
    values = logits.float()
    return ((values >= kept.threshold[:, None]) & (values > -torch.inf)).numpy()


def differences(rule, logits, top_ks, top_ps, joint: bool = False) -> tuple[int, int]:
    """(rows that differ from the oracle for no reason, rows that differ at the boundary)."""
    arguments = logits.float().numpy(), top_ks.numpy(), top_ps.numpy()
    differs = (rule(logits, top_ks, top_ps) != kept_by_sorting(*arguments, joint)).any(axis=1)
    if not differs.any():
        return 0, 0
    excused = differs & near_the_boundary(*arguments, joint)
    return int((differs & ~excused).sum()), int(excused.sum())


def rule_of(body: str, joint: bool = False):
    """The kept tokens of an implementation, whose maxima and masses are checked on the way."""

    def rule(logits, top_ks, top_ps):
        kept = sampling.top_k_top_p.implementation(body)(logits, top_ks, top_ps, joint)
        values = logits.float().numpy().astype(np.float64)
        assert kept.max.tolist() == values.max(axis=1).tolist()
        assert kept.threshold.isfinite().all()
        tokens = tokens_kept(logits, kept)
        weights = np.where(tokens, np.exp(values - values.max(axis=1, keepdims=True)), 0.0)
        np.testing.assert_allclose(kept.mass.numpy(), weights.sum(axis=1), rtol=2e-6)
        return tokens

    return rule


def random_rows(num_rows: int, vocab_size: int, seed: int, dtype: torch.dtype = torch.float32):
    """(logits, top_ks, top_ps): all scales, ties, -inf and ends of both parameters among them."""
    generator = torch.Generator().manual_seed(seed)

    def chance(share: float, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) < share

    scales = torch.tensor([0.0, 0.01, 1.0, 3.0, 30.0])
    scale = scales[torch.randint(len(scales), (num_rows, 1), generator=generator)]
    logits = scale * torch.randn(num_rows, vocab_size, generator=generator)
    logits += 20 * torch.randn(num_rows, 1, generator=generator) * chance(0.5, num_rows, 1)
    coarse = chance(0.4, num_rows, 1)
    logits = torch.where(coarse, (2 * logits).round() / 2, logits).to(dtype)
    forbidden = chance(0.3, num_rows, 1) & chance(0.5, num_rows, vocab_size)
    forbidden[:, -1] = False
    logits = logits.masked_fill(forbidden, -torch.inf)

    def one_of(ends: list) -> torch.Tensor:
        return torch.tensor(ends)[torch.randint(len(ends), (num_rows,), generator=generator)]

    top_ks = torch.randint(1, min(vocab_size, 100) + 1, (num_rows,), generator=generator)
    ends = one_of([1, 2, vocab_size, vocab_size + 1, NO_TOP_K])
    top_ks = torch.where(chance(0.5, num_rows), ends, top_ks)
    top_ps = torch.rand(num_rows, generator=generator)
    top_ps = torch.where(chance(0.5, num_rows), one_of([0.0, 1e-6, 0.9, 1 - 2.0**-24, 1.0]), top_ps)
    return logits, top_ks, top_ps
