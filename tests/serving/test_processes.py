"""Two tensor-parallel ranks, two replicas, or a prefill and a decode server say what one process
says without speculation.

Greedy tokens are the same; the probability of every sampled token is transformers' own, which it
would not be if two processes disagreed about one token or one slot.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from disaggregated import Disaggregated, prefill_and_decode
from launched_server import LaunchedServer, Reply, ServerConfig, greedy
from reference_model import ReferenceModel
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import lossless_mix, ragged_prompts

from benchmarks.server import free_port

NUM_PROMPTS = 64
NEW_TOKENS = 32
# Below this the test would be about row 0 of verify only.
MIN_TOKENS_PER_STEP = 1.3
# Nine times the largest seen on a CPU with AVX-512, 2.1e-5 behind a transfer; 1.7e-5 of two ranks.
MAX_DIFFERENCE = 2e-4
SAMPLED = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]
nano_deepseek = pytest.mark.parametrize("model", ["nano-deepseek"])
tensor_parallel = pytest.mark.parametrize("variant", ["tensor-parallel"])
data_parallel = pytest.mark.parametrize("variant", ["data-parallel"])
disaggregation = pytest.mark.parametrize("variant", ["disaggregation"])

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


@pytest.fixture(scope="module")
def bootstrap_port() -> int:
    """Where the prefill server's requests are met; the same for all tests, which share servers."""
    return free_port()


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
    server: LaunchedServer | Disaggregated, prompts: Prompts, expected: list[list[int]]
) -> list[Reply]:
    found = server.generate_each(prompts, greedy(NEW_TOKENS), 16)
    assert [reply.tokens for reply in found] == expected
    print(f"tokens per step: {tokens_per_step(found):.2f}")
    assert tokens_per_step(found) > MIN_TOKENS_PER_STEP
    return found


def largest_sampled_difference(
    server: LaunchedServer | Disaggregated, prompts: Prompts, reference: ReferenceModel
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
    assert largest_sampled_difference(ranks, unrelated_prompts, reference) > 500 * MAX_DIFFERENCE


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


@nano_deepseek
@disaggregation
def test_a_prefill_and_a_decode_server_say_what_one_says(
    servers: ServerPool,
    model_folder: Path,
    prompts: Prompts,
    expected: list[list[int]],
    bootstrap_port: int,
    variant: str,
) -> None:
    prefill, decode = servers.get(*prefill_and_decode(model_folder, bootstrap_port))
    both = Disaggregated(prefill, decode, bootstrap_port)
    assert_same_tokens(both, prompts, expected)
    # Again, from the prefill server's radix cache.
    again = assert_same_tokens(both, prompts, expected)
    assert sum(reply.cached_tokens > 0 for reply in again) > NUM_PROMPTS // 2
    assert not prefill.logged_batch_sizes("Decode")
    assert not decode.logged_batch_sizes("Prefill")
    assert max(decode.logged_batch_sizes("Decode")) >= 8


@nano_deepseek
@disaggregation
def test_sampled_tokens_behind_a_transfer_are_the_models(
    servers: ServerPool,
    model_folder: Path,
    unrelated_prompts: Prompts,
    reference: ReferenceModel,
    bootstrap_port: int,
    variant: str,
) -> None:
    running = servers.get(*prefill_and_decode(model_folder, bootstrap_port))
    both = Disaggregated(*running, bootstrap_port)
    assert largest_sampled_difference(both, unrelated_prompts, reference) < MAX_DIFFERENCE


@nano_deepseek
@disaggregation
def test_a_decode_server_that_starts_from_the_draft_is_found(
    servers: ServerPool,
    model_folder: Path,
    unrelated_prompts: Prompts,
    reference: ReferenceModel,
    bootstrap_port: int,
    variant: str,
) -> None:
    """The control: what follows a token that was not emitted is less likely than it says."""
    prefill, decode = prefill_and_decode(model_folder, bootstrap_port)
    running = servers.get(prefill, broken(decode, "the_draft_is_taken_for_the_token"))
    both = Disaggregated(*running, bootstrap_port)
    assert largest_sampled_difference(both, unrelated_prompts, reference) > 500 * MAX_DIFFERENCE
