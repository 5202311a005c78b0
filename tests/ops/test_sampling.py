"""The greedy draw is the first of the largest logits of a row, whoever computes it, and
exponential sampling draws each token as often as its weight says.

The oracles are Python's max over a list, and the weights themselves.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from sglang_ascend.ops import sampling
from sglang_ascend.sampling.noise import exponential

LOGITS = st.one_of(st.integers(-3, 3).map(float), st.just(float("-inf")), st.just(1e30))
ROWS = st.integers(1, 9).flatmap(
    lambda width: st.lists(st.lists(LOGITS, min_size=width, max_size=width), min_size=1, max_size=5)
)


def first_of_the_largest(rows: list[list[float]]) -> list[int]:
    return [row.index(max(row)) for row in rows]


@pytest.mark.parametrize("name", list(sampling.greedy._implementations))
@given(rows=ROWS)
def test_it_is_the_first_of_the_largest(name, rows):
    drawn = sampling.greedy.implementation(name)(torch.tensor(rows))
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == first_of_the_largest(rows)


@pytest.mark.parametrize("name", list(sampling.greedy._implementations))
@pytest.mark.parametrize("shape", [(1, 49152), (130, 4099), (0, 7)])
def test_rows_of_a_vocabulary(name, shape):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    drawn = sampling.greedy.implementation(name)(logits)
    assert drawn.tolist() == first_of_the_largest(logits.tolist())


def test_strided_rows_and_bf16():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    assert sampling.greedy(logits[::2]).tolist() == first_of_the_largest(logits[::2].tolist())
    rounded = logits.bfloat16()
    assert sampling.greedy(rounded).tolist() == first_of_the_largest(rounded.tolist())


WEIGHTS = torch.tensor([0.0, 3.0, 1.0, 0.0, 0.5, 4.5])
NUM_DRAWS = 40_000


def fit(tokens: torch.Tensor) -> float:
    """p-value of tokens drawn by WEIGHTS; 0 where one of weight 0 was drawn."""
    counts = torch.bincount(tokens, minlength=len(WEIGHTS)).double()
    drawn, expected = counts[WEIGHTS > 0], WEIGHTS[WEIGHTS > 0].double()
    if counts.sum() != drawn.sum():
        return 0.0
    return chisquare(drawn, expected / expected.sum() * drawn.sum()).pvalue


def sample(weights: torch.Tensor) -> torch.Tensor:
    """NUM_DRAWS times with fresh noise."""
    rows = torch.empty(NUM_DRAWS, dtype=torch.int64)
    return sampling.sample(weights.expand(NUM_DRAWS, -1), exponential(None, rows, len(weights)))


def test_exponential_sampling_draws_each_token_by_its_weight():
    torch.manual_seed(0)
    assert fit(sample(WEIGHTS)) > 1e-3


def test_sampling_of_other_weights_would_be_seen():
    """The control: uniform noise in place of exponential, and weights of which one is a tenth
    higher."""
    torch.manual_seed(0)
    uniform = (WEIGHTS / torch.rand(NUM_DRAWS, len(WEIGHTS))).argmax(dim=-1)
    assert fit(uniform) < 1e-6
    higher = WEIGHTS * torch.tensor([1, 1, 1, 1, 1, 1.1])
    assert fit(sample(higher)) < 1e-6
