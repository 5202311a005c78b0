"""Experts are what their formulas say.

The oracles are float64 loops over single numbers, written from the papers; a control with one
mistake in the formula does not pass.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from sglang_ascend.ops import experts


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chosen(scores: list[float], bias: list[float], k: int, groups: int, kept: int) -> list[int]:
    """The experts of one row, best first, by sorting."""
    affinity = [1 / (1 + math.exp(-score)) for score in scores]
    choice = [a + b for a, b in zip(affinity, bias, strict=True)]
    size = len(scores) // groups
    of_group = [sorted(choice[g * size : (g + 1) * size])[-2:] for g in range(groups)]
    best = sorted(range(groups), key=lambda g: -sum(of_group[g]))[:kept]
    allowed = [e for e in range(len(scores)) if e // size in best]
    return sorted(allowed, key=lambda e: -choice[e])[:k]


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (4, 1)])
def test_experts_are_chosen_with_the_bias_and_weighed_without_it(groups, kept):
    scores, bias = noise(40, 16), noise(16, seed=1)
    weights, ids = experts.gating(
        scores, bias, num_experts_per_token=3, num_groups=groups, num_kept_groups=kept, scale=2.5
    )
    for row, found, weighed in zip(scores.tolist(), ids.tolist(), weights.tolist(), strict=True):
        assert found == chosen(row, bias.tolist(), 3, groups, kept)
        affinity = [1 / (1 + math.exp(-row[e])) for e in found]
        assert weighed == pytest.approx([2.5 * a / sum(affinity) for a in affinity], rel=1e-5)
    unbiased = [chosen(row, [0.0] * 16, 3, groups, kept) for row in scores.tolist()]
    assert ids.tolist() != unbiased


def test_rows_go_to_their_experts_and_come_back_weighted():
    x, weights = noise(5, 7), noise(4, 7, 6, seed=1)
    ids = torch.tensor([[3, 0], [0, 1], [3, 1], [0, 3], [1, 0]], dtype=torch.int32)
    shares = noise(5, 2, seed=2)
    copies, places, counts = experts.permute(x, ids, num_experts=4)
    assert counts.tolist() == [4, 3, 0, 3]
    by_expert = [row for expert in range(4) for row in range(5) if expert in ids[row].tolist()]
    assert torch.equal(copies, x[by_expert])
    products = experts.grouped_matmul(copies, weights, counts)
    found = experts.unpermute(products, shares, places)
    expected = torch.zeros(5, 6, dtype=torch.float64)
    for row in range(5):
        for j in range(2):
            expected[row] += shares[row, j] * (x[row].double() @ weights[ids[row, j]].double())
    assert_close(found, expected.float())
    astray = experts.unpermute(products, shares, places.flip(0))
    assert not torch.allclose(astray, expected.float())
