"""Every verified row is penalised for what was emitted before it: committed tokens, and the drafts
that it stands behind.

The oracle replays one request and one token at a time with Python lists.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from sglang_ascend.sampling.penalties import BAN, OutputCounts, Penalties, terms_of

VOCAB_SIZE, WIDTH, NUM_ROWS = 17, 4, 6
INF = float("inf")

# frequency, presence, repetition, min_new_tokens, stop tokens
REQUESTS = [
    (0.0, 0.0, 1.0, 0, ()),
    (0.7, 0.0, 1.0, 0, ()),
    (0.0, -0.4, 1.0, 0, ()),
    (0.0, 0.0, 1.3, 9, (2, 5)),
    (1.1, 0.3, 0.8, 3, (0,)),
]


def penalised(row: list[float], output: list[int], request: tuple) -> list[float]:
    """The definition, for one row and the tokens emitted before it."""
    frequency, presence, repetition, min_new_tokens, stop_tokens = request
    result = []
    for token, logit in enumerate(row):
        count = output.count(token)
        if count:
            logit -= frequency * count + presence
            logit = logit * repetition if logit < 0 else logit / repetition
        result.append(logit)
    if len(output) < min_new_tokens:
        for token in stop_tokens:
            result[token] = -INF
    return result


def batch_of(requests: list[tuple]) -> Penalties:
    frequency, presence, repetition, min_new_tokens, stop_tokens = zip(*requests, strict=True)
    stops = torch.zeros(len(requests), VOCAB_SIZE, dtype=torch.bool)
    for row, tokens in enumerate(stop_tokens):
        stops[row, list(tokens)] = True
    floats = (torch.tensor(values) for values in (frequency, presence, repetition))
    return Penalties(*floats, torch.tensor(min_new_tokens), stops)


class Replay:
    """Five requests over random steps: device state beside Python lists."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows = torch.tensor([4, 0, 5, 2, 1])
        self.counts = OutputCounts(NUM_ROWS, VOCAB_SIZE, "cpu")
        # Rows had other requests before; a retracted request has output already.
        self.outputs = [[], [], self.tokens(3), self.tokens(1), []]
        self.counts.restart(self.rows, [self.tokens(5) for _ in REQUESTS])
        self.counts.restart(self.rows, self.outputs)
        self.last = self.tokens(5)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB_SIZE // 2) for _ in range(count)]

    def candidates(self) -> torch.Tensor:
        return torch.tensor([[last, *self.tokens(WIDTH - 1)] for last in self.last])

    def terms(self, candidates: torch.Tensor):
        """As the step makes them: what is out before row j is the output and candidates 0..j."""
        before = torch.tensor([[len(output)] for output in self.outputs])
        return terms_of(
            batch_of(REQUESTS),
            self.counts.along(self.rows, candidates),
            before + 1 + torch.arange(WIDTH),
        )

    def commit(self, candidates: torch.Tensor) -> None:
        kept = [self.random.randint(1, WIDTH) for _ in REQUESTS]
        self.counts.add(self.rows, candidates, torch.tensor(kept))
        for output, row, length in zip(self.outputs, candidates.tolist(), kept, strict=True):
            output += row[:length]
        self.last = self.tokens(5)


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_penalised_for_what_precedes_them(seed):
    replay = Replay(seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(8):
        candidates = replay.candidates()
        logits = 4 * torch.randn(len(REQUESTS), WIDTH, VOCAB_SIZE, generator=generator)
        found = logits.clone()
        replay.terms(candidates).apply(found)
        for i, request in enumerate(REQUESTS):
            for j in range(WIDTH):
                output = replay.outputs[i] + candidates[i, : j + 1].tolist()
                expected = penalised(logits[i, j].tolist(), output, request)
                allowed = found[i, j].where(found[i, j] > BAN / 2, -INF).tolist()
                assert allowed == pytest.approx(expected, abs=1e-5)
        replay.commit(candidates)


def test_counting_committed_tokens_only_would_be_seen():
    """The control: SGLang's own rule, one set of penalties for all rows of a step."""
    replay = Replay(0)
    candidates = replay.candidates()
    along = replay.counts.along(replay.rows, candidates)
    committed = replay.counts.of(replay.rows)[:, None].expand_as(along)
    before = torch.zeros(len(REQUESTS), WIDTH, dtype=torch.int64)
    right, relaxed = (terms_of(batch_of(REQUESTS), counts, before) for counts in (along, committed))
    assert not torch.equal(right.additive, relaxed.additive)
    assert not torch.equal(right.scale, relaxed.scale)


def test_a_stop_token_is_drawn_before_its_time_where_nothing_else_is_left():
    """A grammar that has ended allows stop tokens alone; in the control the row is no
    distribution."""
    replay = Replay(0)
    replay.outputs = [[] for _ in REQUESTS]
    terms, stops = replay.terms(replay.candidates()), torch.tensor([2, 5])
    is_left = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, stops, True)
    for forbidden, is_whole in ((BAN, True), (-INF, False)):
        logits = torch.zeros(len(REQUESTS), WIDTH, VOCAB_SIZE)
        replace(terms, additive=terms.additive.where(terms.additive > BAN / 2, forbidden)).apply(
            logits
        )
        anything = torch.softmax(logits[3, 0], dim=-1)
        assert anything[stops].tolist() == [0, 0]
        left = torch.softmax(logits[3, 0].where(is_left, -INF), dim=-1)
        assert bool(left.isfinite().all()) == is_whole
        assert (left[stops].sum() == 1) == is_whole


def test_a_request_without_penalties_keeps_its_logits():
    replay = Replay(1)
    logits = torch.randn(len(REQUESTS), WIDTH, VOCAB_SIZE)
    found = logits.clone()
    replay.terms(replay.candidates()).apply(found)
    assert torch.equal(found[0], logits[0])
