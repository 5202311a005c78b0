"""Norms, rotations, activation, cache writes and experts are what their formulas say.

The oracles are float64 loops over single numbers, written from the papers; a control with one
mistake in the formula does not pass.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from sglang_ascend.ops import activation, experts, kv_cache, norm, rotary

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(row: list[float], weight: list[float], eps: float) -> list[float]:
    rms = math.sqrt(sum(x * x for x in row) / len(row) + eps)
    return [x / rms * w for x, w in zip(row, weight, strict=True)]


def turned(row: list[float], angles: list[float], pairs: list[tuple[int, int]]) -> list[float]:
    """Column a, b of each pair turned by its angle, as the points of a plane."""
    result = list(row)
    for angle, (a, b) in zip(angles, pairs, strict=True):
        point = complex(row[a], row[b]) * complex(math.cos(angle), math.sin(angle))
        result[a], result[b] = point.real, point.imag
    return result


def turned_rows(
    x: torch.Tensor, angles: torch.Tensor, pairs: list[tuple[int, int]]
) -> torch.Tensor:
    rows = zip(x.tolist(), angles.tolist(), strict=True)
    return torch.tensor([[turned(head, of_row, pairs) for head in row] for row, of_row in rows])


def cosines(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, dim / 2] -> cosines and sines [rows, dim], each half a copy of the other."""
    both = torch.cat([angles, angles], dim=-1)
    return both.cos(), both.sin()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_divides_by_the_root_mean_square(dtype):
    x, weight = noise(5, 7, dtype=dtype), noise(7, dtype=dtype, seed=1)
    expected = [normed(row, weight.tolist(), EPS) for row in x.tolist()]
    found = norm.rms_norm(x, weight, EPS)
    assert_close(found, torch.tensor(expected).to(dtype))
    # Of the sum in place of the mean all would be smaller by the root of 7.
    assert not torch.allclose(found.float(), torch.tensor(expected) / math.sqrt(7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_is_added_before_the_norm_and_handed_on(dtype):
    x, residual = noise(5, 7, dtype=dtype), noise(5, 7, dtype=dtype, seed=1)
    weight = noise(7, dtype=dtype, seed=2)
    sums = (x.double() + residual.double()).tolist()
    found, total = norm.add_rms_norm(x, residual, weight, EPS)
    assert_close(found, torch.tensor([normed(row, weight.tolist(), EPS) for row in sums]).to(dtype))
    assert_close(total, torch.tensor(sums).to(dtype))
    assert not torch.allclose(found.float(), norm.rms_norm(x, weight, EPS).float())


def test_halves_turn_column_i_with_i_plus_half():
    x, angles = noise(5, 3, 8), noise(5, 4, seed=1)
    expected = turned_rows(x, angles, [(i, i + 4) for i in range(4)])
    assert_close(rotary.rotate_halves(x, *cosines(angles)), expected)
    assert not torch.allclose(rotary.rotate_halves(x, *cosines(-angles)), expected)


def test_pairs_turn_neighbours_and_leave_even_columns_before_odd_ones():
    x, angles = noise(5, 3, 8), noise(5, 4, seed=1)
    expected = turned_rows(x, angles, [(2 * i, 2 * i + 1) for i in range(4)])
    found = rotary.rotate_pairs(x, *cosines(angles))
    assert_close(found, torch.cat([expected[..., 0::2], expected[..., 1::2]], dim=-1))
    assert not torch.allclose(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_gates_the_second_half_by_the_first(dtype):
    x = noise(5, 6, dtype=dtype)
    expected = [
        [g / (1 + math.exp(-g)) * u for g, u in zip(row[:3], row[3:], strict=True)]
        for row in x.tolist()
    ]
    found = activation.swiglu(x)
    assert_close(found, torch.tensor(expected).to(dtype))
    swapped = activation.swiglu(torch.cat([x[:, 3:], x[:, :3]], dim=-1))
    assert not torch.allclose(found.float(), swapped.float())


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_keys_and_values_land_in_their_slots_and_nowhere_else(slot_dtype):
    key, value = noise(3, 2, 5), noise(3, 2, 5, seed=1)
    caches = torch.full((4, 8, 2, 5), 7.0), torch.full((4, 8, 2, 5), 7.0)
    slots = torch.tensor([9, 31, 0], dtype=slot_dtype)
    kv_cache.write_kv(key, value, *caches, slots)
    for rows, cache in ((key, caches[0]), (value, caches[1])):
        for page in range(4):
            for offset in range(8):
                slot = 8 * page + offset
                expected = torch.full((2, 5), 7.0)
                for row, of_row in zip(rows, slots.tolist(), strict=True):
                    expected = row if slot == of_row else expected
                assert torch.equal(cache[page, offset], expected)


def test_a_latent_is_normed_and_its_rope_key_rotated_by_pairs():
    kv, weight, angles = noise(3, 6 + 4), noise(6, seed=1), noise(3, 2, seed=2)
    latent_cache, rope_cache = torch.zeros(2, 4, 1, 6), torch.zeros(2, 4, 1, 4)
    slots = torch.tensor([5, 0, 3])
    kv_cache.write_latent(kv, weight, *cosines(angles), slots, latent_cache, rope_cache, EPS)
    for row, of_row, slot in zip(kv.tolist(), angles.tolist(), slots.tolist(), strict=True):
        latent = latent_cache.view(-1, 6)[slot]
        assert_close(latent, torch.tensor(normed(row[:6], weight.tolist(), EPS)))
        rope = turned(row[6:], of_row, [(0, 1), (2, 3)])
        assert_close(rope_cache.view(-1, 4)[slot], torch.tensor(rope[0::2] + rope[1::2]))
    assert (latent_cache.view(-1, 6).abs().sum(1) > 0).sum() == 3


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
    weights, ids = experts.choose(
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
    copies, places, counts = experts.route(x, ids, num_experts=4)
    assert counts.tolist() == [4, 3, 0, 3]
    by_expert = [row for expert in range(4) for row in range(5) if expert in ids[row].tolist()]
    assert torch.equal(copies, x[by_expert])
    products = experts.grouped_matmul(copies, weights, counts)
    found = experts.combine(products, shares, places)
    expected = torch.zeros(5, 6, dtype=torch.float64)
    for row in range(5):
        for j in range(2):
            expected[row] += shares[row, j] * (x[row].double() @ weights[ids[row, j]].double())
    assert_close(found, expected.float())
    astray = experts.combine(products, shares, places.flip(0))
    assert not torch.allclose(astray, expected.float())
