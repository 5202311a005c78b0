"""Temperature, top-k, top-p and min-p have one meaning, and a draw follows it.

The oracle filters one row at a time in float64 Python; draws are counted over a grid of uniform
numbers.
"""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ascend.ops import sampling

TOP_K_ALL = 1 << 30


def filtered(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float):
    """The definition, written as it reads; ranks by probability, then by token id."""
    largest = max(row)
    weights = [math.exp((logit - largest) / temperature) for logit in row]
    probs = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(row)), key=lambda token: (-probs[token], token))
    kept = {
        token
        for rank, token in enumerate(order)
        if rank < top_k
        and sum(probs[before] for before in order[:rank]) <= top_p
        and probs[token] >= min_p * max(probs)
    }
    mass = sum(probs[token] for token in kept)
    return [probs[token] / mass if token in kept else 0.0 for token in range(len(row))]


ROW = st.lists(st.integers(-40, 40).map(lambda x: x / 8), min_size=1, max_size=12)
PARAMETERS = st.tuples(
    st.sampled_from([0.25, 0.7, 1.0, 2.0]),
    st.sampled_from([1, 2, 5, TOP_K_ALL]),
    st.sampled_from([0.101, 0.503, 0.907, 1.0]),
    st.sampled_from([0.0, 0.053, 0.307, 1.0]),
)


def filter_rows(rows: list[list[float]], parameters: list[tuple]) -> torch.Tensor:
    temperatures, top_ks, top_ps, min_ps = zip(*parameters, strict=True)
    return sampling.filter_probs(
        torch.tensor(rows, dtype=torch.float64),
        torch.tensor(temperatures, dtype=torch.float64)[:, None],
        torch.tensor(top_ks, dtype=torch.int32),
        torch.tensor(top_ps, dtype=torch.float64),
        torch.tensor(min_ps, dtype=torch.float64),
    )


@given(row=ROW, parameters=PARAMETERS)
def test_a_row_is_filtered_as_the_definition_says(row, parameters):
    (probs,) = filter_rows([row], [parameters])
    assert probs.tolist() == pytest.approx(filtered(row, *parameters), abs=1e-12)


def test_rows_do_not_see_each_other():
    generator = torch.Generator().manual_seed(0)
    rows = (3 * torch.randn(5, 40, generator=generator)).tolist()
    parameters = [
        (0.7, TOP_K_ALL, 0.9, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.3, 7, 0.5, 0.1),
        (1.0, TOP_K_ALL, 1.0, 0.2),
        (0.2, 3, 1.0, 0.0),
    ]
    together = filter_rows(rows, parameters)
    for row, parameter, probs in zip(rows, parameters, together, strict=True):
        assert probs.tolist() == pytest.approx(filtered(row, *parameter), abs=1e-12)


def test_the_filters_are_joint_and_not_one_after_the_other():
    """Top-k leaves 0.5 + 0.3 of the mass; top-p of those alone would keep only the first."""
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    (probs,) = filter_rows([logits], [(1.0, 2, 0.55, 0.0)])
    assert probs.tolist() == pytest.approx([0.625, 0.375, 0.0])
    in_turn = filtered([math.log(0.625), math.log(0.375)], 1.0, TOP_K_ALL, 0.55, 0.0)
    assert in_turn == [1.0, 0.0]


@given(weights=st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any))
def test_a_grid_of_uniform_numbers_draws_each_token_by_its_weight(weights):
    total, per_unit = sum(weights), 6
    grid = (torch.arange(total * per_unit, dtype=torch.float64) + 0.5) / (total * per_unit)
    drawn = sampling.inverse_cdf(torch.tensor(weights).float().expand(len(grid), -1), grid)
    assert drawn.bincount(minlength=len(weights)).tolist() == [per_unit * w for w in weights]


def test_the_ends_of_the_interval_draw_tokens_that_have_weight():
    weights = torch.tensor([0.0, 0.1, 0.2, 0.0]).expand(3, -1)
    grid = torch.tensor([0.0, 1 - 2.0**-53, 1 - 2.0**-32], dtype=torch.float64)
    assert sampling.inverse_cdf(weights, grid).tolist() == [1, 2, 2]


def murmur3(key: bytes) -> int:
    """MurmurHash3 x86 32-bit, seed 0, of whole four-byte blocks."""
    h = 0
    for (k,) in struct.iter_unpack("<I", key):
        k = k * 0xCC9E2D51 % 2**32
        k = (k << 15 | k >> 17) % 2**32 * 0x1B873593 % 2**32
        h ^= k
        h = ((h << 13 | h >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    h ^= len(key)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor % 2**32
    return h ^ h >> 16


def test_the_oracle_knows_a_published_value():
    assert murmur3(b"test") == 0xBA6BD213


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**20),
    column=st.integers(0, 2**32 - 1),
)
def test_the_hash_is_murmur3_of_seed_position_and_column(seed, position, column):
    key = struct.pack("<QII", seed % 2**64, position, column)
    hashed = sampling.murmur_hash32(
        torch.tensor([seed]), torch.tensor([position]), torch.tensor([column])
    )
    assert hashed.tolist() == [[murmur3(key)]]
