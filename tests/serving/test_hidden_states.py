"""A request that asks for hidden states gets those of plain decode: of its prompt, and of each
token the one that it was drawn from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from launched_server import LaunchedServer, Reply, greedy
from server_pairs import TEST_TIMEOUT_S, ask_both, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import conversation

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]
ENABLED = ("--enable-return-hidden-states",)
# Of a state's norm: fp32 sums of another order.
ROUNDING = 1e-4


@pytest.fixture
def pair(servers: ServerPool, model_folder) -> list[LaunchedServer]:
    plain, mtp = plain_and_mtp(model_folder, mtp_flags=ENABLED)
    return servers.get_flushed(replace(plain, flags=(*plain.flags, *ENABLED)), mtp)


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> list[list[int]]:
    return [conversation(tokenizer, text) for text in held_out_prompts["maths"][:12]]


def states_of(reply: Reply) -> torch.Tensor:
    """Of the prompt and of each token but the last, float32 [tokens, hidden_size]."""
    prompt, *tokens = reply.meta["hidden_states"]
    return torch.tensor([*prompt, *tokens])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the row that is farthest off, by its norm."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


def test_each_token_has_the_state_that_plain_decode_gives_it(
    pair: list[LaunchedServer], prompts: list[list[int]]
) -> None:
    sampling = greedy(40)
    plain, mtp = ask_both(
        pair, lambda server: server.generate(prompts, sampling, return_hidden_states=True)
    )
    assert tokens_per_step(mtp) > 1.5
    for prompt, expected, found in zip(prompts, plain, mtp, strict=True):
        assert found.tokens == expected.tokens
        states = states_of(found)
        assert len(states) == len(prompt) + len(found.tokens) - 1
        assert distance(states, states_of(expected)) < ROUNDING
        # The control: each row's neighbour is another state.
        assert distance(states[1:], states_of(expected)[:-1]) > 0.1


def test_a_reply_that_ends_within_a_step_has_the_states_of_its_tokens(
    pair: list[LaunchedServer], prompts: list[list[int]], tokenizer
) -> None:
    (free,) = ask_both(pair[:1], lambda server: server.generate(prompts, greedy(40)))
    stops = [tokenizer.decode(reply.tokens[n : n + 1]) for n, reply in enumerate(free, 3)]
    samplings = [greedy(40) | {"stop": [stop]} for stop in stops]
    plain, mtp = ask_both(
        pair, lambda server: server.generate(prompts, samplings, return_hidden_states=True)
    )
    for expected, found in zip(plain, mtp, strict=True):
        assert found.tokens == expected.tokens
        # Of its prompt a reply has what was not cached, in one place.
        ours, theirs = (torch.tensor(of.meta["hidden_states"][1:]) for of in (found, expected))
        assert len(ours) == len(theirs) and distance(ours, theirs) < ROUNDING
