"""The bodies of filter_probs that do not sort keep the very tokens that the definition keeps, of
equal ones the lower ids, with the same probabilities.

The oracle sorts a row in float64. A row may differ from it only where a mass lies within 1e-6 of
top_p, or a probability within 1e-6 of min_p's share, as rounding decides there; such rows are few.
"""

import numpy as np
import pytest
import torch
from joint_filters import filter_differences, rows_to_filter

from sglang_ascend.ops import sampling

pytestmark = pytest.mark.usefixtures("triton_interpreter")

VOCAB_SIZE = 49152  # SmolLM2's
GRIDS = {
    "numba": [(500, 1), (2000, 3), (5000, 40), (2000, 65), (500, 4500), (40, VOCAB_SIZE)],
    "triton": [(3, 1), (12, 40), (10, 65), (3, 1000)],
}


@pytest.mark.parametrize("body", GRIDS)
def test_the_tokens_that_sorting_keeps_are_kept_and_no_others(body):
    rule = sampling.filter_probs.implementation(body)
    found = [filter_differences(rule, *rows_to_filter(*size, seed=size[1])) for size in GRIDS[body]]
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


def not_quite_normalised(*rows):
    return sampling.filter_probs(*rows) * (1 + 2e-5)


@pytest.mark.parametrize(
    "rule", [every_equal, one_after_the_other, without_min_p, not_quite_normalised]
)
def test_a_broken_rule_is_caught(rule):
    wrong, _ = filter_differences(rule, *rows_to_filter(1000, 40, seed=6))
    assert wrong > 20
