"""A thinking section lasts from its start token to its end token, wherever a step is cut.

The oracle counts over Python lists.
"""

import torch

from sglang_ascend.sampling.thinking import OUTSIDE, Delimiters, ThinkingSections

START, END = 7, 8
OTHERS = Delimiters(5, 6)  # of a request that thinks between other tokens
GENERATOR = torch.Generator().manual_seed(0)


def length_behind(tokens: list[int], delimiters: Delimiters) -> int:
    length = OUTSIDE
    for token in tokens:
        length = length + 1 if length != OUTSIDE else OUTSIDE
        if token == delimiters.start:
            length = 0
        elif token == delimiters.end:
            length = OUTSIDE
    return length


def test_a_section_is_as_long_as_its_tokens_say_wherever_a_step_is_cut():
    tokens = torch.randint(4, 10, (5, 200), generator=GENERATOR).tolist()
    rows = torch.tensor([3, 0, 4, 1, 2])
    heads = [[START, 1], [1, END], [], [5, END, 5], [END, START, 5]]
    delimiters = [Delimiters(START, END)] * 3 + [OTHERS] + [Delimiters(START, END)]
    sections = ThinkingSections(5, "cpu")
    sections.restart(rows, delimiters, heads)
    done, seen = [0] * 5, set()
    while max(done) <= 196:
        block = torch.tensor([of[at : at + 4] for of, at in zip(tokens, done, strict=True)])
        along = sections.along(rows, block)
        for i in range(5):
            for j in range(4):
                history = heads[i] + tokens[i][: done[i] + j + 1]
                expected = length_behind(history, delimiters[i])
                seen.add(expected)
                assert along[i, j] == expected
        kept = torch.randint(1, 5, (5,), generator=GENERATOR)
        sections.commit(rows, along, kept)
        done = [at + k for at, k in zip(done, kept.tolist(), strict=True)]
    assert {OUTSIDE, 0, 1, 5} <= seen
