"""The greedy draw is the first of the largest logits of a row, whoever computes it.

The oracle is Python's max over a list.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ascend.ops import sampling

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
