"""A lossy policy keeps the drafts that its rule names, where its rule holds, and no others.

Oracles are the rules written over Python lists.
"""

import pytest
import torch

from sglang_ascend.sampling.lossy import Relaxed, Threshold, emit, parse

GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", None),
        ("threshold:1", Threshold(1.0)),
        ("threshold:0.5", Threshold(0.5)),
        ("relaxed:10,0.6", Relaxed(10, 0.6, "<think>", "</think>")),
        ("relaxed:2,0,[A],[B]", Relaxed(2, 0.0, "[A]", "[B]")),
    ],
)
def test_a_policy_is_read(text, policy):
    assert parse(text) == policy


@pytest.mark.parametrize(
    "text",
    [
        *("threshold", "threshold:0", "threshold:1.5", "threshold:x", "threshold:1,2"),
        *("relaxed:10", "relaxed:0,0.5", "relaxed:3,2", "relaxed:x,1", "relaxed:3,0.5,<think>"),
        "typical:0.3",
    ],
)
def test_anything_else_is_refused_with_the_syntax(text):
    with pytest.raises(ValueError, match="threshold:RATIO or relaxed:TOP_N,DELTA"):
        parse(text)


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_threshold_compares_p_with_a_share_of_q(ratio):
    p, q = (torch.rand(50, 3, generator=GENERATOR) for _ in range(2))
    p[:5] = 0
    q[:3] = 0
    kept = Threshold(ratio).accepts(p, q)
    for i, row in enumerate(kept.tolist()):
        expected = [x > 0 and x >= ratio * y for x, y in zip(p[i], q[i], strict=True)]
        assert row == expected


def test_relaxed_acceptance_asks_for_rank_and_distance():
    spread = torch.linspace(0.1, 4, 40)[:, None, None]
    probs = torch.softmax(spread * torch.randn(40, 3, 9, generator=GENERATOR), dim=-1)
    drafts = torch.randint(9, (40, 3), generator=GENERATOR)
    kept = Relaxed(4, 0.3).accepts(probs, drafts)
    seen = set()
    for i in range(40):
        for j in range(3):
            row = probs[i, j].tolist()
            p = row[drafts[i, j]]
            near, high = p >= max(row) - 0.3, sorted(row, reverse=True).index(p) < 4
            seen.add((near, high))
            assert bool(kept[i, j]) == (near and high)
    assert len(seen) == 4, "each of the two conditions must have failed alone"


def test_what_is_emitted_is_kept_drafts_and_one_draw():
    accepted = torch.tensor([[True, False, True], [True, True, True], [False, True, True]])
    drafts = torch.tensor([[1, 2, 3]] * 3)
    drawn = torch.tensor([[10, 11, 12, 13]] * 3)
    tokens, accept_lens = emit(accepted, drafts, drawn)
    emitted = [
        row[:length] for row, length in zip(tokens.tolist(), accept_lens.tolist(), strict=True)
    ]
    assert emitted == [[1, 11], [1, 2, 3, 13], [10]]
