"""What a request asks of its samples holds in MTP's step on the emulated NPU, on every drafted row.

Penalties and a bias are added to transformers' logits, place by place; drafts that are drawn, and
the lossy rule, leave greedy requests their tokens and sampled ones their nucleus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from greedy_oracle import Oracle, below_largest

from npu_emulation.mtp_runs import served_by_mtp, tokens_per_step
from npu_emulation.sglang_runs import prompt, requests
from sglang_ascend.env import LOSSY_ACCEPTANCE
from sglang_ascend.models.random_deepseek import VOCABULARY

GRAPH_OF_4 = ("--cuda-graph-bs-decode", "4")
PROMPTS = [prompt(length, seed) for seed, length in enumerate((9, 14))]
NEW_TOKENS = 12
TEMPERATURE, TOP_P = 0.8, 0.9
# Less than nothing, so that tokens come again: random weights repeat none of themselves.
FREQUENCY, PRESENCE = -2.0, -2.0
BIAS, BIASED = 3.0, 1234
GREEDY = requests(PROMPTS, max_new_tokens=NEW_TOKENS)
SAMPLED = requests(PROMPTS, temperature=TEMPERATURE, top_p=TOP_P, max_new_tokens=NEW_TOKENS)
PENALTIES = {"frequency_penalty": FREQUENCY, "presence_penalty": PRESENCE}
PENALIZED = requests(PROMPTS, max_new_tokens=NEW_TOKENS, **PENALTIES)
WITH_BIAS = requests(PROMPTS, max_new_tokens=NEW_TOKENS, logit_bias={str(BIASED): BIAS})

Added = Callable[[Sequence[int]], torch.Tensor]


@pytest.fixture(scope="module")
def outputs(guessable) -> list[list[list[int]]]:
    """Of greedy requests as they are, with penalties and with a bias, the last two in one batch."""
    waves = [GREEDY, PENALIZED + WITH_BIAS]
    tokens = served_by_mtp(guessable, waves, *GRAPH_OF_4).tokens
    return [tokens[:2], tokens[2:4], tokens[4:]]


def penalties(output: Sequence[int]) -> torch.Tensor:
    """Of what was emitted before each place: [len(output), vocabulary]."""
    rows = torch.zeros(len(output), VOCABULARY)
    for place in range(len(output)):
        for token in set(output[:place]):
            rows[place, token] = -FREQUENCY * output[:place].count(token) - PRESENCE
    return rows


def bias(output: Sequence[int]) -> torch.Tensor:
    return BIAS * (torch.arange(VOCABULARY) == BIASED).expand(len(output), VOCABULARY)


def wrong_places(exact: Oracle, outputs: Sequence[list[int]], added: Added) -> int:
    """Tokens that are not the likeliest, by more than bfloat16 moves two logits apart there."""
    wrong = 0
    for tokens, output in zip(PROMPTS, outputs, strict=True):
        logits = exact.logits(torch.float32, tokens, output)
        moved = (exact.logits(torch.bfloat16, tokens, output) - logits).abs().amax(-1)
        logits = logits + added(output)
        wrong += int((below_largest(logits, torch.tensor(output)) > 2 * moved).sum())
    return wrong


@pytest.mark.parametrize(("place", "added"), [(1, penalties), (2, bias)])
def test_penalties_and_a_bias_are_added_on_every_drafted_row(outputs, exact, place, added):
    exact.check_greedy(PROMPTS, outputs[0])
    assert wrong_places(exact, outputs[place], added) == 0
    # The control: without what was asked for these tokens would be wrong.
    assert wrong_places(exact, outputs[place], lambda output: torch.zeros(1)) > 0


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        pytest.param(("--speculative-use-rejection-sampling",), {}, id="rejection sampling"),
        pytest.param(
            (),
            {LOSSY_ACCEPTANCE.name: "threshold:1"},
            id="lossy threshold",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_drawn_drafts_keep_greedy_tokens_and_the_nucleus(guessable, exact, flags, environ):
    waves = [GREEDY, SAMPLED]
    report = served_by_mtp(guessable, waves, *GRAPH_OF_4, *flags, environ=environ)
    exact.check_greedy(PROMPTS, report.tokens[: len(GREEDY)])
    sampled = report.tokens[len(GREEDY) :]
    pairs = list(zip(PROMPTS, sampled, strict=True))
    assert [exact.outside_nucleus(*pair, TEMPERATURE, TOP_P) for pair in pairs] == [[], []]
    assert any(exact.greedy(*pair).wrong for pair in pairs)  # they were drawn
    assert tokens_per_step(report) > 1.05
