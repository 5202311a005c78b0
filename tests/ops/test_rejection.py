"""Rejection sampling emits the target's distribution, whatever the draft's.

Probabilities are quarters and uniform numbers the midpoints of twelfths, so that counting
integrates exactly: every quotient and every normalised residual is a multiple of 1/12. Nothing is
sampled.
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
import torch

from sglang_ascend.ops import chain

VOCABULARY = range(3)
NUM_STEPS = 2
STARTS = range(16)
GRID = 12
QUARTERS = [p for p in product(range(5), repeat=3) if sum(p) == 4]
# Where the draft cannot say token 2.
REDUCED = [q for q in QUARTERS if q[2] == 0]

Distribution = tuple[Fraction, ...]
Draft = Callable[[tuple[int, ...]], Distribution]


def state_of(prefix: tuple[int, ...], start: int) -> int:
    state = start
    for token in prefix:
        state = (17 * state + 5 * token + 3) % 1009
    return state


def model(start: int, choices: list[tuple[int, ...]]) -> Draft:
    """An autoregressive model: every prefix has its own distribution."""
    return lambda prefix: tuple(
        Fraction(quarters, 4) for quarters in choices[state_of(prefix, start) % len(choices)]
    )


def floats(rows: list[Distribution]) -> torch.Tensor:
    return torch.tensor([[float(p) for p in row] for row in rows])


UNIFORM = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
ALL_UNIFORM = torch.cartesian_prod(UNIFORM, UNIFORM, UNIFORM)


def honest(q: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Draft distributions, numbers of acceptance and of the draw, as they should be."""
    return q, uniform[:, :2], uniform[:, 2:].expand(-1, NUM_STEPS + 1)


def another_draft(q: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Broken: verified against a distribution that the drafts were not drawn from."""
    return torch.full_like(q, 1 / 3), *honest(q, uniform)[1:]


def one_number(q: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Broken: the number that rejects also draws."""
    return q, uniform[:, :2], torch.cat([uniform[:, :2], uniform[:, 2:]], dim=1)


def emitted(target: Draft, draft: Draft, use=honest) -> dict[tuple[int, ...], Fraction]:
    """Exact distribution of what one step emits, over all drafts and numbers."""
    output: dict[tuple[int, ...], Fraction] = {}
    for drafted in product(VOCABULARY, repeat=NUM_STEPS):
        q_rows = [draft(drafted[:j]) for j in range(NUM_STEPS)]
        weight = Fraction(1, GRID**3)
        for j, token in enumerate(drafted):
            weight *= q_rows[j][token]
        if not weight:
            continue
        p = floats([target(drafted[:j]) for j in range(NUM_STEPS + 1)])
        count = len(ALL_UNIFORM)
        q, accept_uniform, draw_uniform = use(floats(q_rows).expand(count, -1, -1), ALL_UNIFORM)
        tokens, accept_lens = chain.verify_by_rejection(
            p.expand(count, -1, -1),
            q,
            torch.tensor([drafted]).expand(count, -1),
            accept_uniform,
            draw_uniform,
        )
        for row, length in zip(tokens.tolist(), accept_lens.tolist(), strict=True):
            key = tuple(row[:length])
            output[key] = output.get(key, Fraction(0)) + weight
    return output


def continued(output: dict[tuple[int, ...], Fraction], target: Draft) -> dict:
    """Shorter outputs go on as the target does, up to NUM_STEPS + 1 tokens."""
    finished: dict[tuple[int, ...], Fraction] = {}
    pending = dict(output)
    while pending:
        tokens, mass = pending.popitem()
        if len(tokens) == NUM_STEPS + 1:
            finished[tokens] = finished.get(tokens, Fraction(0)) + mass
            continue
        for token, p in enumerate(target(tokens)):
            if p:
                pending[(*tokens, token)] = pending.get((*tokens, token), Fraction(0)) + mass * p
    return finished


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("choices", [QUARTERS, REDUCED], ids=["every token", "reduced draft"])
def test_the_output_has_the_distribution_of_the_target_exactly(start, choices):
    target, draft = model(start, QUARTERS), model(7 * start + 1, choices)
    output = emitted(target, draft)
    assert sum(output.values()) == 1
    assert continued(output, target) == continued({(): Fraction(1)}, target)


def test_the_drafts_of_this_test_are_kept_to_every_length():
    lengths = set()
    for start in STARTS:
        output = emitted(model(start, QUARTERS), model(7 * start + 1, QUARTERS))
        lengths |= {len(tokens) for tokens, mass in output.items() if mass}
    assert lengths == {1, 2, 3}


@pytest.mark.parametrize("use", [another_draft, one_number])
def test_a_broken_use_has_another_distribution(use):
    distances = []
    for start in STARTS:
        target, draft = model(start, QUARTERS), model(7 * start + 1, QUARTERS)
        expected = continued({(): Fraction(1)}, target)
        found = continued(emitted(target, draft, use), target)
        keys = expected.keys() | found.keys()
        distances.append(sum(abs(expected.get(k, 0) - found.get(k, 0)) for k in keys) / 2)
    assert max(distances) > 0, "the equality above is exact: any distance fails it"


def test_a_draft_that_is_the_target_is_never_rejected():
    target = model(3, QUARTERS)
    assert {len(tokens) for tokens in emitted(target, target)} == {NUM_STEPS + 1}


def test_a_greedy_row_is_right_whatever_draft_distribution_it_is_told():
    """A greedy request's own q may be stale: p is a point mass, which decides alone."""
    p = torch.eye(3)[[1, 2, 0]].expand(2, -1, -1)
    stale = torch.eye(3)[[1, 1]].expand(2, -1, -1)
    drafts = torch.tensor([[1, 0], [0, 2]])
    ones = torch.full((2, 3), 1 - 2.0**-33, dtype=torch.float64)
    tokens, accept_lens = chain.verify_by_rejection(p, stale, drafts, ones[:, :2], ones)
    assert accept_lens.tolist() == [2, 1]
    assert [tokens[0, :2].tolist(), tokens[1, :1].tolist()] == [[1, 2], [1]]
