"""Prompt lookup drafts what followed the longest, and of those the last, earlier occurrence of a
request's last tokens: every body, against a search over Python lists.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lookup_oracle import searched

from sglang_ascend.ops import chain

BODIES = ["reference", "numba"]
NUM_ROWS, PADDING = 6, 3


def looked_up(body, texts: list[list[int]], num_drafts: int, least: int, most: int):
    """In a pool whose other rows, and places behind each text, hold what must not be read."""
    width = max(map(len, texts)) + PADDING
    pool = torch.randint(3, (NUM_ROWS, width), generator=torch.Generator().manual_seed(width))
    rows = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(len(texts)))
    rows = rows[: len(texts)]
    for row, text in zip(rows.tolist(), texts, strict=True):
        pool[row, : len(text)] = torch.tensor(text)
    lens = torch.tensor([len(text) for text in texts])
    drafts, matched = body(pool.int(), rows, lens, num_drafts, least, most)
    assert drafts.dtype == matched.dtype == torch.int64
    return list(zip(drafts.tolist(), matched.tolist(), strict=True))


def one_token_later(body):
    """Broken: a token that is not known yet counts, or one that is known does not."""

    def broken(tokens, rows, lens, *args):
        return body(tokens, rows, lens - (lens > 1).long(), *args)

    return broken


texts = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=NUM_ROWS
)
matches = st.tuples(st.integers(1, 4), st.integers(0, 3))


@pytest.mark.parametrize("name", BODIES)
@given(texts=texts, num_drafts=st.integers(1, 9), match=matches)
def test_every_body_finds_what_a_search_finds(name, texts, num_drafts, match):
    least, most = match[0], sum(match)
    found = looked_up(chain.look_up.implementation(name), texts, num_drafts, least, most)
    assert found == [searched(text, num_drafts, least, most) for text in texts]


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(
    ("text", "drafts", "matched"),
    [
        ([7], [7, 7, 7, 7], 0),
        ([1, 2, 3], [3, 3, 3, 3], 0),
        ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2], 2),
        # The last of two places, and the longer of two matches although the other is later.
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4], 2),
        ([8, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2], [3, 9, 1, 2], 3),
        ([5, 6, 5, 6, 5], [6, 5, 6, 5], 3),
        ([4, 4], [4, 4, 4, 4], 0),
        ([4, 4, 4], [4, 4, 4, 4], 2),
    ],
)
def test_by_hand(name, text, drafts, matched):
    assert looked_up(chain.look_up.implementation(name), [text], 4, 2, 4) == [(drafts, matched)]


@pytest.mark.parametrize("name", BODIES)
def test_a_history_that_is_off_by_one_is_found(name):
    """The control."""
    text = [1, 2, 3, 9, 1, 2]
    broken = one_token_later(chain.look_up.implementation(name))
    assert looked_up(broken, [text], 4, 2, 4) != [searched(text, 4, 2, 4)]


@pytest.mark.parametrize("name", BODIES)
def test_nothing_is_looked_up_for_an_empty_batch(name):
    nothing, pool = torch.empty(0, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int32)
    drafts, matched = chain.look_up.implementation(name)(pool, nothing, nothing, 4, 2, 4)
    assert drafts.shape == (0, 4) and matched.shape == (0,)
