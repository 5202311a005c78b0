"""The bodies of filter_probs that do not sort keep the very tokens that the definition keeps, of
equal ones the lower ids, with the same probabilities.

The oracle sorts a row in float64. A row may differ from it only where a mass lies within 1e-6 of
top_p, or a probability within 1e-6 of min_p's share, as rounding decides there; such rows are few.
"""

import numpy as np
import pytest
import torch
from kept_tokens import random_rows

from sglang_ascend.ops import sampling

pytestmark = pytest.mark.usefixtures("triton_interpreter")

VOCAB_SIZE = 49152  # SmolLM2's
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


def rows_of(num_rows: int, vocab_size: int, seed: int) -> tuple[torch.Tensor, ...]:
    logits, top_ks, top_ps = random_rows(num_rows, vocab_size, seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def one_of(choices: list[float]) -> torch.Tensor:
        return torch.tensor(choices)[torch.randint(len(choices), (num_rows,), generator=generator)]

    return logits, one_of([0.25, 0.7, 1.0, 2.0])[:, None], top_ks, top_ps, one_of([0, 0.053, 1.0])


def differences(rule, *rows: torch.Tensor) -> tuple[int, int]:
    """(rows that differ from the oracle for no reason, rows that differ by rounding)."""
    expected, near = filtered(*rows)
    found = rule(*rows).double().numpy()
    differs = ((found > 0) != (expected > 0)).any(axis=1)
    differs |= ~np.isclose(found, expected, rtol=1e-4, atol=1e-9).all(axis=1)
    return int((differs & ~near).sum()), int((differs & near).sum())


GRIDS = {
    "numba": [(500, 1), (2000, 3), (5000, 40), (2000, 65), (500, 4500), (40, VOCAB_SIZE)],
    "triton": [(3, 1), (12, 40), (10, 65), (3, 1000)],
}


@pytest.mark.parametrize("body", GRIDS)
def test_the_tokens_that_sorting_keeps_are_kept_and_no_others(body):
    rule = sampling.filter_probs.implementation(body)
    found = [differences(rule, *rows_of(*size, seed=size[1])) for size in GRIDS[body]]
    wrong, excused = np.sum(found, axis=0)
    assert wrong == 0
    assert excused <= 0.02 * sum(num_rows for num_rows, _ in GRIDS[body])


@pytest.mark.parametrize("body", GRIDS)
@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (1, 1.0, [1]),
        (2, 1.0, [1, 3]),
        (3, 1.0, [1, 3, 4]),
        (9, 0.0, [1]),
        (9, 0.3, [1, 3]),  # 2/7 of the mass before the second, 4/7 before the third
        (9, 0.6, [1, 3, 4]),
        (2, 0.6, [1, 3]),
        (9, 0.9, [0, 1, 3, 4]),
    ],
)
def test_of_equal_tokens_the_lower_ids_stay(body, top_k, top_p, kept):
    logits = torch.tensor([[1.0, 2.0, 0.0, 2.0, 2.0]]).log()
    parameters = torch.ones(1, 1), torch.tensor([top_k]), torch.tensor([top_p]), torch.zeros(1)
    probs = sampling.filter_probs.implementation(body)(logits, *parameters)
    assert probs[0].nonzero()[:, 0].tolist() == kept
    assert probs.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("body", GRIDS)
def test_a_row_that_nothing_can_be_drawn_from_is_an_error(body):
    logits = torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]])
    parameters = torch.ones(2, 1), torch.tensor([2, 2]), torch.ones(2), torch.zeros(2)
    with pytest.raises(ValueError, match=r"logits rows \[1\] \(1 of 2\)"):
        sampling.filter_probs.implementation(body)(logits, *parameters)


def every_equal(logits, temperatures, top_ks, top_ps, min_ps):
    """Broken: of the tokens at the threshold all stay."""
    scaled = logits / temperatures
    kept = sampling.top_k_top_p(scaled, top_ks, top_ps, joint=True)
    weights = torch.where(scaled >= kept.threshold[:, None], scaled, -torch.inf).softmax(-1)
    weights = torch.where(weights >= min_ps[:, None] * weights.amax(-1, keepdim=True), weights, 0)
    return weights / weights.sum(-1, keepdim=True)


def one_after_the_other(logits, temperatures, top_ks, top_ps, min_ps):
    """Broken: top-p of what top-k left."""
    probs = sampling.filter_probs(logits, temperatures, top_ks, torch.ones_like(top_ps), min_ps)
    ones, everything = torch.ones_like(temperatures), torch.full_like(top_ks, 1 << 30)
    return sampling.filter_probs(probs.log(), ones, everything, top_ps, torch.zeros_like(min_ps))


def without_min_p(logits, temperatures, top_ks, top_ps, min_ps):
    return sampling.filter_probs(logits, temperatures, top_ks, top_ps, torch.zeros_like(min_ps))


@pytest.mark.parametrize("rule", [every_equal, one_after_the_other, without_min_p])
def test_a_broken_rule_is_caught(rule):
    wrong, _ = differences(rule, *rows_of(1000, 40, seed=6))
    assert wrong > 20
