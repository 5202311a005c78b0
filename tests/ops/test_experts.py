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
from sglang_ascend.ops.dispatch import REFERENCE
from sglang_ascend.ops.experts.numba import (
    MOST_PRODUCTS,
    MOST_ROWS,
    PART,
    PRODUCTS_OF_THREAD,
)

BODIES = pytest.mark.parametrize("body", [REFERENCE, "numba"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# float32: the roundings of a sum of a few hundred products. bf16: the one rounding of the result,
# beside sums of float32.
TOLERANCES = {
    torch.float32: {"rtol": 2.0**-18, "atol": 2.0**-18},
    torch.bfloat16: {"rtol": 2.0**-8, "atol": 2.0**-14},
}


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agrees(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return torch.allclose(found.double(), exact, **TOLERANCES[found.dtype])


def chosen(scores: list[float], bias: list[float], k: int, groups: int, kept: int) -> list[int]:
    """The experts of one row, best first, by sorting."""
    affinity = [1 / (1 + math.exp(-score)) for score in scores]
    choice = [a + b for a, b in zip(affinity, bias, strict=True)]
    size = len(scores) // groups
    of_group = [sorted(choice[g * size : (g + 1) * size])[-2:] for g in range(groups)]
    best = sorted(range(groups), key=lambda g: -sum(of_group[g]))[:kept]
    allowed = [e for e in range(len(scores)) if e // size in best]
    return sorted(allowed, key=lambda e: -choice[e])[:k]


@BODIES
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (4, 1)])
def test_experts_are_chosen_with_the_bias_and_weighed_without_it(body, groups, kept):
    scores, bias = noise(40, 16), noise(16, seed=1)
    weights, ids = experts.gating.implementation(body)(
        scores, bias, num_experts_per_token=3, num_groups=groups, num_kept_groups=kept, scale=2.5
    )
    assert ids.dtype == torch.int32
    for row, found, weighed in zip(scores.tolist(), ids.tolist(), weights.tolist(), strict=True):
        assert found == chosen(row, bias.tolist(), 3, groups, kept)
        affinity = [1 / (1 + math.exp(-row[e])) for e in found]
        assert weighed == pytest.approx([2.5 * a / sum(affinity) for a in affinity], rel=1e-5)
    unbiased = [chosen(row, [0.0] * 16, 3, groups, kept) for row in scores.tolist()]
    assert ids.tolist() != unbiased


@DTYPES
def test_the_compiled_choice_is_the_references(dtype):
    scores, bias = noise(64, 32, dtype=dtype), noise(32, dtype=dtype, seed=1)
    sizes = {"num_experts_per_token": 4, "num_groups": 8, "num_kept_groups": 3, "scale": 1.5}
    weights, ids = experts.gating.implementation("numba")(scores, bias, **sizes)
    expected, expected_ids = experts.gating.implementation(REFERENCE)(scores, bias, **sizes)
    assert torch.equal(ids, expected_ids)
    assert_close(weights, expected)


@BODIES
def test_rows_go_to_their_experts_and_come_back_weighted(body):
    x, weights = noise(5, 7), noise(4, 6, 7, seed=1).mT
    ids = torch.tensor([[3, 0], [0, 1], [3, 1], [0, 3], [1, 0]], dtype=torch.int32)
    shares = noise(5, 2, seed=2)
    copies, places, counts = experts.permute.implementation(body)(x, ids, num_experts=4)
    assert counts.tolist() == [4, 3, 0, 3]
    by_expert = [row for expert in range(4) for row in range(5) if expert in ids[row].tolist()]
    assert torch.equal(copies, x[by_expert])
    products = experts.grouped_matmul.implementation(body)(copies, weights, counts)
    unpermute = experts.unpermute.implementation(body)
    found = unpermute(products, shares, places)
    expected = torch.zeros(5, 6, dtype=torch.float64)
    for row in range(5):
        for j in range(2):
            expected[row] += shares[row, j] * (x[row].double() @ weights[ids[row, j]].double())
    assert_close(found, expected.float())
    astray = unpermute(products, shares, places.flip(0))
    assert not torch.allclose(astray, expected.float())


# Groups without rows, of one, of several fours and a rest; one matrix for one thread, and several.
GROUPS = ([0, 1, 0, 6, 0], [3], [0, 0, 1], [9, 0, 4])
WIDE = PRODUCTS_OF_THREAD // (4 * PART)


@BODIES
@DTYPES
@pytest.mark.parametrize("counts", GROUPS, ids=str)
@pytest.mark.parametrize(("width", "out"), [(33, 7), (WIDE, 3 * PART + 5)])
def test_each_row_meets_the_matrix_of_its_own_group(body, dtype, counts, width, out):
    x = noise(sum(counts), width, dtype=dtype)
    weights = noise(len(counts), out, width, dtype=dtype, seed=1).mT / width**0.5
    found = experts.grouped_matmul.implementation(body)(x, weights, torch.tensor(counts))
    groups = [group for group, count in enumerate(counts) for _ in range(count)]
    exact = torch.stack(
        [row.double() @ weights[g].double() for row, g in zip(x, groups, strict=True)]
    )
    assert found.dtype == dtype
    assert agrees(found, exact)
    assert not agrees(found, exact.flip(-1))


@BODIES
@DTYPES
@pytest.mark.parametrize("of_weights", [torch.float32, None], ids=["fp32 weights", "its own"])
def test_a_row_is_the_weighted_sum_of_its_copies(body, dtype, of_weights):
    copies, places = noise(12, 33, dtype=dtype), torch.randperm(12).int()
    shares = noise(4, 3, dtype=of_weights or dtype, seed=1)
    found = experts.unpermute.implementation(body)(copies, shares, places)
    exact = (copies.double()[places.long()].view(4, 3, 33) * shares.double()[..., None]).sum(1)
    assert agrees(found, exact)
    assert not agrees(found, exact.flip(0))


def test_what_the_compiled_products_leave_to_pytorch():
    """Many rows of a large matrix, on average, matrices that lie otherwise, other dtypes."""
    counts, weights = torch.tensor([1, 1]), noise(2, 5, 8).mT
    large = torch.empty(2, 2, MOST_PRODUCTS // MOST_ROWS).mT
    more = torch.empty(4, *large.mT.shape[1:]).mT
    chosen = [
        experts.grouped_matmul.body_of(*call, counts).name
        for call in (
            (noise(2, 8), weights),
            (noise(MOST_ROWS + 1, 8), weights),
            (torch.empty(MOST_ROWS, large.shape[1]), large),
            (torch.empty(2 * MOST_ROWS, large.shape[1]), more),
            (torch.empty(MOST_ROWS + 1, large.shape[1]), large),
            (noise(2, 8), weights.contiguous()),
            (noise(2, 8).half(), weights.half()),
        )
    ]
    assert chosen == [*["numba"] * 4, *[REFERENCE] * 3]
