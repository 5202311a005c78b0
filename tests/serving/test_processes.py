"""Two tensor-parallel ranks, or two replicas, say what one process says without speculation.

Greedy tokens are the same; the probability of every sampled token is transformers' own, which it
would not be if two processes disagreed about one token or one slot.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from launched_server import LaunchedServer, Reply, ServerConfig, greedy
from reference_model import ReferenceModel
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import lossless_mix, ragged_prompts

NUM_PROMPTS = 64
NEW_TOKENS = 32
# Below this the test would be about row 0 of verify only.
MIN_TOKENS_PER_STEP = 1.3
MAX_DIFFERENCE = 1e-3
SAMPLED = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]
nano_deepseek = pytest.mark.parametrize("model", ["nano-deepseek"])
tensor_parallel = pytest.mark.parametrize("variant", ["tensor-parallel"])
data_parallel = pytest.mark.parametrize("variant", ["data-parallel"])

Prompts = list[list[int]]


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, NUM_PROMPTS)


@pytest.fixture
def unrelated_prompts(tokenizer, held_out_prompts) -> Prompts:
    """No two share a prefix: what one sampled cannot be cached for another."""
    return ragged_prompts(tokenizer, [t for texts in held_out_prompts.values() for t in texts])


@pytest.fixture(scope="module")
def known_replies() -> dict[Path, list[list[int]]]:
    """What one process said without speculation, by model folder, filled by whoever is first."""
    return {}


@pytest.fixture
def expected(
    servers: ServerPool,
    model_folder: Path,
    prompts: Prompts,
    known_replies: dict[Path, list[list[int]]],
) -> list[list[int]]:
    """Asked beforehand, so that two cores never run it beside the others' processes."""
    if model_folder not in known_replies:
        (plain,) = servers.get(plain_and_mtp(model_folder)[0])
        replies = plain.generate_each(prompts, greedy(NEW_TOKENS), 16)
        known_replies[model_folder] = [reply.tokens for reply in replies]
    return known_replies[model_folder]


def with_flags(folder: Path, *flags: str) -> ServerConfig:
    mtp = plain_and_mtp(folder)[1]
    return replace(mtp, flags=(*mtp.flags, *flags))


def broken(config: ServerConfig, mistake: str) -> ServerConfig:
    return replace(
        config,
        python_path=Path(__file__).parent / "broken_processes",
        variables=(*config.variables, ("BROKEN_PROCESSES", mistake)),
    )


def assert_same_tokens(
    server: LaunchedServer, prompts: Prompts, expected: list[list[int]]
) -> list[Reply]:
    found = server.generate_each(prompts, greedy(NEW_TOKENS), 16)
    assert [reply.tokens for reply in found] == expected
    print(f"tokens per step: {tokens_per_step(found):.2f}")
    assert tokens_per_step(found) > MIN_TOKENS_PER_STEP
    return found


def largest_sampled_difference(
    server: LaunchedServer, prompts: Prompts, reference: ReferenceModel
) -> float:
    replies = server.generate_each(prompts, SAMPLED, 16, return_logprob=True, top_logprobs_num=2)
    assert all(len(reply.output_logprobs.tokens) == 24 for reply in replies)
    worst = max(map(reference.largest_difference, prompts, replies))
    print(f"largest difference of {len(replies)} sampled replies: {worst:.2e}")
    return worst


@nano_deepseek
@tensor_parallel
def test_two_ranks_say_what_one_says(
    servers: ServerPool,
    model_folder: Path,
    prompts: Prompts,
    expected: list[list[int]],
    variant: str,
) -> None:
    (ranks,) = servers.get(with_flags(model_folder, "--tp-size", "2"))
    assert ranks.info()["tp_size"] == 2
    assert_same_tokens(ranks, prompts, expected)
    assert max(ranks.logged_batch_sizes("Decode")) >= 8


@nano_deepseek
@tensor_parallel
def test_two_ranks_sample_the_same_tokens(
    servers: ServerPool,
    model_folder: Path,
    unrelated_prompts: Prompts,
    reference: ReferenceModel,
    variant: str,
) -> None:
    (ranks,) = servers.get(with_flags(model_folder, "--tp-size", "2"))
    assert largest_sampled_difference(ranks, unrelated_prompts, reference) < MAX_DIFFERENCE


@nano_deepseek
@tensor_parallel
def test_ranks_that_sample_apart_are_found(
    servers: ServerPool,
    model_folder: Path,
    unrelated_prompts: Prompts,
    reference: ReferenceModel,
    variant: str,
) -> None:
    """The control: a rank that runs on a token of its own spoils the sums of both."""
    config = broken(with_flags(model_folder, "--tp-size", "2"), "ranks_draw_apart")
    (ranks,) = servers.get(config)
    assert largest_sampled_difference(ranks, unrelated_prompts, reference) > 100 * MAX_DIFFERENCE


@nano_deepseek
@data_parallel
def test_two_replicas_say_what_one_says(
    servers: ServerPool,
    model_folder: Path,
    prompts: Prompts,
    expected: list[list[int]],
    variant: str,
) -> None:
    (replicas,) = servers.get(with_flags(model_folder, "--dp-size", "2"))
    assert_same_tokens(replicas, prompts, expected)
    decoded_by = re.findall(r" DP(\d)[^\]]*\] Decode batch", replicas.log())
    assert set(decoded_by) == {"0", "1"}
