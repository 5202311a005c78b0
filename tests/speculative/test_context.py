"""What is tracked of a request's text is what the definition says of its tokens, whatever steps,
chunks and rows of the pool they came by.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ascend.ops import chain
from sglang_ascend.speculative.vocabulary.context import ContextTracker, unlisted_context

BODIES = ["reference", "numba"]
VOCAB_SIZE, NUM_ROWS, WIDTH = 12, 5, 4
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)


def expected(tokens: list[int], listed: list[int], most: int) -> list[int]:
    """By hand, the newest first."""
    found: list[int] = []
    for token in reversed(tokens):
        if token not in listed and len(found) < most:
            found.append(token)
    return found


@dataclass
class Pool:
    """A tracker beside the whole texts of its requests."""

    body: str
    listed: list[int]
    most: int
    texts: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        listed = torch.tensor(self.listed, dtype=torch.int64)
        self.tracker = ContextTracker(listed, VOCAB_SIZE, NUM_ROWS, "cpu", self.most)

    def begin(self, row: int, text: list[int]) -> None:
        self.texts[row] = list(text)
        self.tracker.restart(row, text)

    def step(self, emitted: dict[int, list[int]]) -> None:
        """Behind what is emitted stand rejected tokens."""
        rejected = [(sum(tokens) + 1) % VOCAB_SIZE for tokens in emitted.values()]
        padded = [
            [*tokens, *[other] * (WIDTH - len(tokens))]
            for tokens, other in zip(emitted.values(), rejected, strict=True)
        ]
        for row, tokens in emitted.items():
            self.texts[row] += tokens
        self.check([*emitted], torch.tensor(padded), [len(t) for t in emitted.values()])

    def check(self, rows: list[int], tokens: torch.Tensor, num_kept: list[int]) -> None:
        known = self.tracker
        places, found = chain.extend_context.implementation(self.body)(
            known.ring,
            known.num_written,
            known.is_unlisted,
            torch.tensor(rows),
            tokens,
            torch.tensor(num_kept, dtype=torch.int32),
        )
        assert places.dtype == found.dtype == torch.int64
        assert places.tolist() == sorted(places.tolist())
        for place, row in enumerate(rows):
            held = found[places == place].tolist()
            assert sorted(held) == sorted(expected(self.texts[row], self.listed, self.most))

    def check_again(self, rows: list[int]) -> None:
        """Where nothing is emitted."""
        self.check(rows, torch.zeros(len(rows), WIDTH, dtype=torch.int64), [0] * len(rows))


@given(TOKENS, st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8), st.integers(1, 9))
def test_the_definition(tokens: list[int], listed: list[int], most: int) -> None:
    found = unlisted_context(tokens, torch.tensor(listed, dtype=torch.int64), most)
    assert found.tolist()[::-1] == expected(tokens, listed, most)


@pytest.mark.parametrize("body", BODIES)
@given(data=st.data())
def test_rows_of_a_pool_hold_what_the_definition_says(body: str, data: st.DataObject) -> None:
    listed = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), unique=True, max_size=8))
    pool = Pool(body, listed, data.draw(st.integers(WIDTH, 9)))
    for row in range(NUM_ROWS):
        pool.begin(row, data.draw(TOKENS))
    for _ in range(data.draw(st.integers(1, 8))):
        rows = data.draw(st.permutations(range(NUM_ROWS)))[: data.draw(st.integers(1, NUM_ROWS))]
        emitted = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=WIDTH)
        pool.step({row: data.draw(emitted) for row in rows})
    again = data.draw(st.integers(0, NUM_ROWS - 1))
    pool.begin(again, data.draw(TOKENS))  # in the row of one that has ended
    pool.check_again([again])


@pytest.mark.parametrize("body", BODIES)
def test_a_row_of_another_request_is_another_context(body: str) -> None:
    """The control of the comparison above."""
    pool = Pool(body, [0, 1], 4)
    pool.begin(0, [0, 5, 6])
    pool.begin(1, [7])
    pool.check_again([1, 0])
    pool.texts = {0: pool.texts[1], 1: pool.texts[0]}
    with pytest.raises(AssertionError):
        pool.check_again([1, 0])
