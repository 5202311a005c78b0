"""Penalties count every token that was emitted before, with speculation and without.

The oracle is transformers' logits, penalised as the definition reads: at each position the server's
greedy token must be the best one, or as good within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from launched_server import LaunchedServer, Reply, greedy
from reference_model import ReferenceModel
from server_pairs import TEST_TIMEOUT_S, ask_both, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import lossless_mix

NUM_PROMPTS, NEW_TOKENS = 24, 40
# fp32 sums of another order; the usual gap between the best two tokens is a thousand times this.
TIE = 1e-3

PENALTIES = (
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.1},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.3, "presence_penalty": -0.2, "repetition_penalty": 1.15},
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]


def penalised(logits: torch.Tensor, output: Sequence[int], penalties: dict[str, float]):
    """float64 [vocab_size]: the definition, on one row."""
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(logits))
    logits = logits.double()
    logits = logits - penalties.get("frequency_penalty", 0.0) * counts
    logits = logits - penalties.get("presence_penalty", 0.0) * (counts > 0)
    factor = penalties.get("repetition_penalty", 1.0)
    scaled = torch.where(logits < 0, logits * factor, logits / factor)
    return torch.where(counts > 0, scaled, logits)


def num_wrong(
    reference: ReferenceModel, prompt: list[int], reply: Reply, penalties: dict, lag: int = 0
) -> int:
    """Tokens of the reply that are not the best ones, if counts lag so many tokens behind."""
    rows = reference.logits([*prompt, *reply.tokens[:-1]])[len(prompt) - 1 :]
    wrong = 0
    for position, (row, token) in enumerate(zip(rows, reply.tokens, strict=True)):
        counted = reply.tokens[: max(position - lag, 0)]
        scores = penalised(row, counted, penalties)
        wrong += bool(scores.max() - scores[token] > TIE)
    return wrong


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> list[list[int]]:
    return lossless_mix(tokenizer, held_out_prompts, NUM_PROMPTS)


@pytest.fixture
def pair(servers: ServerPool, model_folder) -> list[LaunchedServer]:
    return servers.get(*plain_and_mtp(model_folder))


def test_every_emitted_token_is_counted(
    pair: list[LaunchedServer], prompts: list[list[int]], reference: ReferenceModel
) -> None:
    penalties = [PENALTIES[i % len(PENALTIES)] for i in range(len(prompts))]
    samplings = [greedy(NEW_TOKENS) | penalty for penalty in penalties]
    plain, mtp = ask_both(pair, lambda server: server.generate(prompts, samplings))
    assert [reply.tokens for reply in plain] == [reply.tokens for reply in mtp]
    assert tokens_per_step(mtp) > 1.1, "else rows behind the first were never judged"

    cases = list(zip(prompts, mtp, penalties, strict=True))
    assert sum(num_wrong(reference, *case) for case in cases) == 0
    # The controls: counts that lag a token behind, and none, would have said something else.
    assert sum(num_wrong(reference, *case, lag=1) > 0 for case in cases) > len(cases) // 6
    without = [(prompt, reply, {}) for prompt, reply, _ in cases]
    assert sum(num_wrong(reference, *case) > 0 for case in without) > len(cases) // 2


def test_no_reply_ends_before_its_min_new_tokens(
    pair: list[LaunchedServer], prompts: list[list[int]]
) -> None:
    """Stop tokens are forbidden on each verified row by what precedes that row."""

    def ask(min_new_tokens: int) -> list[list[Reply]]:
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 60}
        sampling["min_new_tokens"] = min_new_tokens
        return ask_both(pair, lambda server: server.generate(prompts, sampling))

    free, _ = ask(0)
    lengths = [len(reply.tokens) for reply in free]
    assert min(lengths) < 21, "some reply must be kept from ending"
    plain, mtp = ask(21)
    assert [reply.tokens for reply in plain] == [reply.tokens for reply in mtp]
    assert min(len(reply.tokens) for reply in mtp) >= 21
