"""`--speculative-adaptive`: whatever K a step has, replies are those without speculation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from launched_server import LaunchedServer, ServerConfig, greedy
from server_pairs import TEST_TIMEOUT_S, ask_both, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import lossless_mix

Prompts = list[list[int]]

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]
# Long enough without drafts that what they are drafted from matters.
OFF_AND_ON = ",".join(["0"] * 24 + ["3"] * 8)
SYNCHRONOUS = ("--disable-overlap-schedule", "--page-size", "16")
# Four prompts at a time, so that others are retracted and begin again.
SMALL_POOL = ("--max-total-tokens", "768", "--schedule-conservativeness", "0.1")


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, 48)


def forced(
    folder: Path, drafts: str, flags: tuple[str, ...] = (), mistake: str = ""
) -> ServerConfig:
    _, mtp = plain_and_mtp(folder, mtp_flags=("--speculative-adaptive", *flags))
    variables = (("FORCED_DRAFTS", drafts), ("MISTAKE", mistake))
    return replace(mtp, python_path=Path(__file__).parent / "forced_drafts", variables=variables)


def check_same(pair: list[LaunchedServer], prompts: Prompts, sampling: dict) -> None:
    """One by one, all at once, and again with what the radix cache has kept."""
    for ask in (
        lambda server: server.generate_each(prompts[:12], sampling, 1),
        lambda server: server.generate_each(prompts, sampling, 16),
        lambda server: server.generate_each(prompts, sampling, 5),
    ):
        plain, adaptive = ask_both(pair, ask)
        assert [reply.tokens for reply in adaptive] == [reply.tokens for reply in plain]


def test_replies_do_not_change_whatever_k_a_step_has(servers, model_folder, prompts):
    pair = servers.get_flushed(plain_and_mtp(model_folder)[0], forced(model_folder, "random"))
    check_same(pair, prompts, greedy(24))
    sampling = {"temperature": 0.9, "top_p": 0.9, "max_new_tokens": 24, "sampling_seed": 7}
    check_same(pair, prompts, sampling)
    # A conversation goes on from a reply that was decoded without drafts.
    ask = greedy(16)
    longer = [
        prompt + reply.tokens
        for prompt, reply in zip(prompts, pair[0].generate_each(prompts, ask, 8), strict=True)
    ]
    pair[1].generate_each(prompts, ask, 8)
    check_same(pair, longer, ask)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [SYNCHRONOUS, SMALL_POOL])
def test_replies_do_not_change_without_overlap_and_in_a_small_pool(
    servers, model_folder, prompts, flags
):
    pair = servers.get_flushed(
        plain_and_mtp(model_folder)[0], forced(model_folder, "random", flags)
    )
    check_same(pair, prompts, greedy(24))


@pytest.mark.slow
def test_what_is_drafted_after_steps_without_drafts_is_accepted_as_often(
    servers: ServerPool, model_folder, prompts
):
    """And less often where the MTP layer was not shown what it had skipped."""
    accepted = {}
    for mistake in ("", "not caught up"):
        config = forced(model_folder, OFF_AND_ON, mistake=mistake)
        (server,) = servers.get_flushed(config)
        accepted[mistake] = tokens_per_step(server.generate_each(prompts, greedy(96), 1))
    print(accepted)
    assert accepted[""] > 1.1 * accepted["not caught up"], accepted
