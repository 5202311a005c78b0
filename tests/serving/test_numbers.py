"""Every log-probability that the server returns in fp32 is transformers' own, within 2e-4.

Wrong slots, positions, masks or lengths in any forward (prefill, chunked prefill, prefill behind a
radix hit, decode, verify) show here first: a greedy token can survive them, its probability cannot.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launched_server import LaunchedServer, Reply, greedy
from reference_model import ReferenceModel
from server_pairs import CHUNK_OF_PAGE, MODELS, TEST_TIMEOUT_S, ask_both, plain_and_mtp
from server_pool import ServerPool
from serving_prompts import RAGGED_LENGTHS, ragged_prompts

# Eight times the largest seen on a CPU with AVX-512, 2.6e-5 of nano-deepseek: sums of other orders.
MAX_DIFFERENCE = 2e-4
NEW_TOKENS = 12
WITH_LOGPROBS = {"return_logprob": True, "top_logprobs_num": 5}

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]
both_models = pytest.mark.parametrize("model", MODELS)
# Each place is a pair of servers; those that are not named here are left to `make test-all`.
IN_MAKE_TEST = {("nano-deepseek", 1), ("nano-deepseek", 128), ("smollm2-mtp", 1)}
every_page_size = pytest.mark.parametrize(
    ("model", "page_size"),
    [
        pytest.param(
            model,
            page_size,
            marks=() if (model, page_size) in IN_MAKE_TEST else pytest.mark.slow,
        )
        for model in MODELS
        for page_size in CHUNK_OF_PAGE
    ],
)


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> list[list[int]]:
    return ragged_prompts(tokenizer, [t for texts in held_out_prompts.values() for t in texts])


@pytest.fixture
def pair(servers: ServerPool, model_folder: Path, page_size: int) -> list[LaunchedServer]:
    """The same model without and with speculation, with an empty radix cache."""
    return servers.get_flushed(*plain_and_mtp(model_folder, page_size))


@every_page_size
def test_a_ragged_batch_of_16_has_the_reference_logprobs(
    pair: list[LaunchedServer],
    prompts: list[list[int]],
    reference: ReferenceModel,
    page_size: int,
) -> None:
    """Prefill of 1 to 1,500 tokens (whole and chunked), then decode or verify of all 16."""
    logged_before = [len(server.logged_batch_sizes("Decode")) for server in pair]
    answers = ask_both(
        pair,
        lambda server: server.generate(
            prompts, greedy(NEW_TOKENS), logprob_start_len=0, **WITH_LOGPROBS
        ),
    )
    for server, replies, before in zip(pair, answers, logged_before, strict=True):
        assert [len(r.prompt_logprobs.tokens) for r in replies] == [n - 1 for n in RAGGED_LENGTHS]
        assert all(len(r.output_logprobs.tokens) == NEW_TOKENS for r in replies)
        assert largest_difference(reference, prompts, replies) < MAX_DIFFERENCE
        assert max(server.logged_batch_sizes("Decode")[before:]) == len(prompts)
        longest_prefill = max(server.logged_prefill_tokens())
        assert longest_prefill <= 512 if CHUNK_OF_PAGE[page_size] == 512 else longest_prefill > 1500
    accepted = sum(reply.meta["spec_num_correct_drafts"] for reply in answers[1])
    assert accepted > len(prompts), "verify must be compared on accepted drafts, not only on row 0"


@every_page_size
def test_a_batch_of_1_has_the_reference_logprobs(
    pair: list[LaunchedServer], prompts: list[list[int]], reference: ReferenceModel
) -> None:
    chosen = [prompt for prompt in prompts if len(prompt) in (1, 17, 400)]
    for replies in ask_both(
        pair,
        lambda server: server.generate_each(
            chosen, greedy(NEW_TOKENS), concurrency=1, logprob_start_len=0, **WITH_LOGPROBS
        ),
    ):
        assert largest_difference(reference, chosen, replies) < MAX_DIFFERENCE


@every_page_size
@pytest.mark.parametrize("batch_size", [1, 16])
def test_a_radix_hit_has_the_reference_logprobs(
    pair: list[LaunchedServer],
    prompts: list[list[int]],
    reference: ReferenceModel,
    page_size: int,
    batch_size: int,
) -> None:
    """Questions behind one cached prefix, of two pages at least: the new part's prompt and output
    log-probabilities. The reference computes the prefix again for each."""
    prefix = prompts[RAGGED_LENGTHS.index(400 if page_size == 128 else 129)]
    continued = [prefix + prompt[:40] for prompt in prompts[:batch_size]]

    def ask(server: LaunchedServer) -> list[Reply]:
        server.generate([prefix], greedy(1))
        return server.generate(
            continued, greedy(NEW_TOKENS), logprob_start_len=len(prefix), **WITH_LOGPROBS
        )

    for replies in ask_both(pair, ask):
        assert all(reply.cached_tokens >= len(prefix) - 2 * page_size for reply in replies)
        assert all(reply.cached_tokens > 0 for reply in replies)
        assert largest_difference(reference, continued, replies) < MAX_DIFFERENCE


@both_models
@pytest.mark.parametrize("page_size", [1])
def test_the_comparison_sees_a_wrong_weight_and_a_wrong_position(
    pair: list[LaunchedServer], prompts: list[list[int]], reference: ReferenceModel
) -> None:
    """The control: the same comparison against a slightly wrong reference fails."""
    prompt = prompts[RAGGED_LENGTHS.index(64)]
    (reply,) = pair[1].generate([prompt], greedy(NEW_TOKENS), logprob_start_len=0, **WITH_LOGPROBS)
    assert reference.largest_difference(prompt, reply) < MAX_DIFFERENCE
    with reference.one_weight_perturbed():
        assert reference.largest_difference(prompt, reply) > 15 * MAX_DIFFERENCE
    # Decode one position too far to the right, as after a miscounted prompt.
    count = len(prompt) + NEW_TOKENS - 1
    positions = [i if i < len(prompt) else i + 1 for i in range(count)]
    assert reference.largest_difference(prompt, reply, positions) > 15 * MAX_DIFFERENCE


def largest_difference(
    reference: ReferenceModel, prompts: list[list[int]], replies: list[Reply]
) -> float:
    pairs = zip(prompts, replies, strict=True)
    worst = max(reference.largest_difference(prompt, reply) for prompt, reply in pairs)
    print(f"largest difference of {len(replies)} replies: {worst:.2e}")
    return worst
