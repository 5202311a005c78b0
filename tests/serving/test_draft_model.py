"""`--speculative-algorithm STANDALONE`: a small model drafts, and no reply changes by it.

Each step accepts what transformers' own forward of the small model would have drafted, so that its
cache holds what it should, its head is its own, and no padding is drafted.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from draft_models import (
    DRAFT_ROWS,
    DraftModelAcceptance,
    Greedy,
    with_draft_model,
    write_target_and_draft,
)
from launched_server import LaunchedServer, ServerConfig, greedy
from server_pairs import TEST_TIMEOUT_S
from server_pool import ServerPool
from tiny_targets import WORDS, write_target
from watched_acceptance import Answer, ask, judge, mistaken, watched

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]
NUM_PROMPTS, NEW_TOKENS, CONCURRENCY = 32, 48, 8
# Requests wait, are cut into chunks, and give their slots up.
SMALL = "--chunked-prefill-size 32 --max-total-tokens 1024 --max-running-requests 8".split()
SMALL += "--context-length 1024".split()  # the targets' own may be more than a draft model reads
RETRACTIONS = (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "23"))
PAGE_SIZE = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_target_and_draft(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture
def plain(folders: tuple[Path, Path]) -> ServerConfig:
    return ServerConfig(folders[0], mtp=False, page_size=PAGE_SIZE, flags=tuple(SMALL))


@pytest.fixture
def pair(
    servers: ServerPool, plain: ServerConfig, folders: tuple[Path, Path], steps: Path
) -> list[LaunchedServer]:
    """Without and with the draft model, with empty radix caches."""
    retracting = replace(plain, variables=RETRACTIONS)
    drafting = watched(with_draft_model(retracting, folders[1]), steps)
    return servers.get_flushed(plain, drafting)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Half of them begin with the one before, so that its cache is found."""
    rng = random.Random(0)
    found: list[list[int]] = []
    for i in range(NUM_PROMPTS):
        begin = found[-1] if i % 2 else []
        found.append([*begin, *rng.choices(range(len(WORDS)), k=rng.randrange(2, 60))])
    return found


def test_greedy_replies_are_those_of_plain_decode_and_drafts_those_of_the_small_model(
    pair: list[LaunchedServer], prompts: list[list[int]], folders: tuple[Path, Path], steps: Path
) -> None:
    plain, drafting = pair
    oracle = DraftModelAcceptance(folders[1])
    answers = ask_twice(drafting, steps, prompts)
    expected = plain.generate_each([a.prompt for a in answers], greedy(NEW_TOKENS), CONCURRENCY)
    assert [a.reply.tokens for a in answers] == [reply.tokens for reply in expected]
    assert sum(a.reply.cached_tokens > 0 for a in answers) > NUM_PROMPTS // 2

    found = judge(oracle, answers)
    print(found)
    assert found.wrong == () and found.num_steps > 800
    assert found.num_ties <= found.num_steps / 100
    assert found.num_first > len(answers), "some request was retracted"
    assert len(found.accepted) == 4 and max(found.accepted.values()) < 0.8 * found.num_steps
    for mistake in ("keys_not_written", "position_of_the_row_before"):
        drafting.flush_cache()
        with mistaken(steps, mistake):
            mistook = judge(oracle, ask(drafting, steps, prompts, greedy(NEW_TOKENS), CONCURRENCY))
        print(f"{mistake}: {mistook}")
        assert mistook.wrong


def ask_twice(server: LaunchedServer, steps: Path, prompts: list[list[int]]) -> list[Answer]:
    """The prompts, then each with its reply and another token behind it."""
    first = ask(server, steps, prompts, greedy(NEW_TOKENS), CONCURRENCY)
    longer = [[*answer.prompt, *answer.reply.tokens, answer.prompt[0]] for answer in first]
    return first + ask(server, steps, longer, greedy(NEW_TOKENS), CONCURRENCY)


def test_seeded_draws_are_those_of_plain_decode(
    pair: list[LaunchedServer], prompts: list[list[int]]
) -> None:
    """Among them rows that only the target has, which the draft model must be able to read."""
    sampling = greedy(NEW_TOKENS) | {"temperature": 1.0, "sampling_seed": 5}
    expected, found = (server.generate_each(prompts, sampling, CONCURRENCY) for server in pair)
    assert [reply.tokens for reply in found] == [reply.tokens for reply in expected]
    drawn = {token for reply in found for token in reply.tokens}
    assert max(drawn) >= DRAFT_ROWS and len(drawn) > len(WORDS)
    assert sum(reply.meta["spec_verify_ct"] for reply in found) < 0.9 * NUM_PROMPTS * NEW_TOKENS


def test_an_update_changes_the_target_alone(
    pair: list[LaunchedServer],
    prompts: list[list[int]],
    folders: tuple[Path, Path],
    steps: Path,
    tmp_path: Path,
) -> None:
    # Before the tests that need other servers, which would stop this pair: what a second process of
    # it wrote in the folder would be taken for another rank's.
    plain, drafting = pair
    target, draft = folders
    other = write_target(tmp_path / "other", "LlamaForCausalLM", vocab_size=24, rms_norm_eps=1e-2)
    for server in pair:
        server.update_weights(other)
    answers = ask(drafting, steps, prompts, greedy(NEW_TOKENS), CONCURRENCY)
    expected = plain.generate_each(prompts, greedy(NEW_TOKENS), CONCURRENCY)
    for server in pair:
        server.update_weights(target)
    assert [a.reply.tokens for a in answers] == [reply.tokens for reply in expected]
    assert judge(DraftModelAcceptance(draft), answers).wrong == ()


def test_what_steps_left_out_is_caught_up_in_order(
    servers: ServerPool,
    plain: ServerConfig,
    folders: tuple[Path, Path],
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """Steps of 0 to 3 drafts and of looked-up chains, and skipped prompts; each row of the draft
    model depends on all before it. A row that was not caught up is found."""
    (steps := tmp_path / "steps").mkdir()
    parts = "forced_drafts", "record_lookups"
    drafting = with_draft_model(plain, folders[1])
    drafting = replace(drafting, flags=(*drafting.flags, "--speculative-adaptive"))
    drafting = replace(drafting, variables=(("SGLANG_ASCEND_LOOKUP_DRAFTS", "5"),))
    schedule = "0,0,0,0,3,3,1,0,0,2,3,0,1,1,2"
    (server,) = servers.get_flushed(watched(drafting, steps, *parts, FORCED_DRAFTS=schedule))
    oracle = DraftModelAcceptance(folders[1])
    answers = ask_twice(server, steps, prompts)
    found = judge(oracle, answers)
    print(found)
    exact = Greedy(folders[0])
    assert all(exact.says(answer.prompt, answer.reply.tokens) for answer in answers)
    assert {step.drafted for answer in answers for step in answer.steps} > {0, 1, 2, 3}
    assert any(step.is_lookup for answer in answers for step in answer.steps)
    assert found.wrong == () and found.num_steps > 1000
    server.flush_cache()
    with mistaken(steps, "not_caught_up"):
        assert judge(oracle, ask(server, steps, prompts, greedy(NEW_TOKENS), CONCURRENCY)).wrong


@pytest.mark.parametrize(
    ("of_target", "of_draft"),
    [
        ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        pytest.param("Glm4MoeLiteForCausalLM", "Qwen2ForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_a_model_of_another_family_and_size_drafts(
    servers: ServerPool,
    plain: ServerConfig,
    prompts: list[list[int]],
    tmp_path: Path,
    of_target: str,
    of_draft: str,
) -> None:
    """For a target of keys by head, and for one of latent attention and experts."""
    (steps := tmp_path / "steps").mkdir()
    target = write_target(tmp_path / "target", of_target)
    draft = write_target(
        tmp_path / "draft", of_draft, hidden_size=16, num_hidden_layers=3, tie_word_embeddings=True
    )
    drafting = with_draft_model(replace(plain, model_path=target), draft)
    (server,) = servers.get_flushed(watched(drafting, steps))
    oracle, exact = DraftModelAcceptance(draft), Greedy(target)
    answers = ask(server, steps, prompts, greedy(NEW_TOKENS), CONCURRENCY)
    found = judge(oracle, answers)
    print(found)
    assert all(exact.says(answer.prompt, answer.reply.tokens) for answer in answers)
    assert found.wrong == () and sum(count for n, count in found.accepted.items() if n) > 10
    with mistaken(steps, "keys_not_written"):
        assert judge(oracle, ask(server, steps, prompts, greedy(NEW_TOKENS), CONCURRENCY)).wrong
