"""`--speculative-adaptive`: whatever K a step has, replies are those without speculation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from launched_server import LaunchedServer, ServerConfig, greedy
from server_pairs import TEST_TIMEOUT_S, ask_both, plain_and_mtp
from serving_prompts import lossless_mix
from watched_acceptance import with_parts

from sglang_ascend.speculative.adaptive.costs import kept as kept_costs

Prompts = list[list[int]]

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]
SYNCHRONOUS = ("--disable-overlap-schedule", "--page-size", "16")
# Four prompts at a time, so that others are retracted and begin again.
SMALL_POOL = ("--max-total-tokens", "768", "--schedule-conservativeness", "0.1")


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, 48)


def forced(folder: Path, *flags: str, **variables: str) -> ServerConfig:
    _, mtp = plain_and_mtp(folder, mtp_flags=("--speculative-adaptive", *flags))
    return with_parts(mtp, "forced_drafts", **{"FORCED_DRAFTS": "random"} | variables)


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
    pair = servers.get_flushed(plain_and_mtp(model_folder)[0], forced(model_folder))
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
    pair = servers.get_flushed(plain_and_mtp(model_folder)[0], forced(model_folder, *flags))
    check_same(pair, prompts, greedy(24))


@pytest.mark.slow
def test_two_ranks_have_the_k_of_the_first(servers, model_folder, prompts, tmp_path):
    """Which would have chosen others, each by itself."""
    told = {"FORCED_DRAFTS": "apart", "ACCEPTANCE": str(tmp_path)}
    config = forced(model_folder, "--tp-size", "2", **told)
    pair = servers.get_flushed(plain_and_mtp(model_folder)[0], config)
    check_same(pair, prompts, greedy(24))
    chosen, chains = (
        [path.read_text().split() for path in tmp_path.glob(f"*.{kind}")]
        for kind in ("chosen", "chains")
    )
    assert len(chosen) == len(chains) == 2
    assert chosen[0] != chosen[1] and len(chosen[0]) > 100
    assert chains[0] == chains[1]


def test_a_server_that_starts_again_knows_what_its_steps_cost(
    servers, model_folder, prompts, tmp_path
):
    """Its log says so. The first one was told K, so that all are known."""
    path = tmp_path / "costs.json"
    kept = {"SGLANG_ASCEND_ADAPTIVE_COSTS": str(path)}
    told = {"FORCED_DRAFTS": "0,0,0,1,1,1,2,2,2,3,3,3"}
    (first,) = servers.get_flushed(forced(model_folder, **told, **kept))
    replies = first.generate_each(prompts, greedy(32), 1)
    found = kept_costs.read(path)
    known = {kind.drafts for load in found.loads for kind in load.kinds}
    assert known == {0, 1, 2, 3}
    _, config = plain_and_mtp(model_folder, mtp_flags=("--speculative-adaptive",))
    (again,) = servers.get_flushed(replace(config, variables=tuple(kept.items())))
    assert f"known of {len(found.loads)} loads" in again.log()
    replies_again = again.generate_each(prompts, greedy(32), 1)
    assert [reply.tokens for reply in replies_again] == [reply.tokens for reply in replies]
