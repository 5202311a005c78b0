"""A short list of draft tokens joined by each request's own text: replies stay the target's, every
step accepts what the definition of such drafts gives, and another request's text is found.

nano-deepseek has no list of its own; here it gets one that lacks most words.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from acceptance_oracle import AcceptanceOracle
from launched_server import greedy
from server_pairs import TEST_TIMEOUT_S, ask_both, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import conversation, lossless_mix
from test_accepted_steps import CONCURRENCY, ask_twice, check, small_pool
from test_sampling_distribution import (
    ALLOWED,
    NUM_DRAWS,
    QUESTION,
    REJECTION,
    Cells,
    check_distribution,
    token_of,
)
from watched_acceptance import ask, judge, mistaken, watched

from sglang_ascend.speculative.vocabulary.file import FILE_NAME

SIZE = 384  # of 4,096 tokens

Prompts = list[list[int]]

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]


def with_list(folder: Path, model_folder: Path, token_ids: list[int]) -> Path:
    shutil.copytree(model_folder, folder)
    (folder / FILE_NAME).write_text(json.dumps({"token_ids": token_ids}))
    return folder


@pytest.fixture(scope="session")
def listed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("with-list") / "nano"


@pytest.fixture
def folder(model_folder: Path, listed_folder: Path) -> Path:
    if not listed_folder.exists():
        with_list(listed_folder, model_folder, list(range(SIZE)))
    return listed_folder


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, 64)


def test_every_step_drafts_of_the_list_and_of_its_own_text(
    servers: ServerPool, folder: Path, prompts: Prompts, tmp_path: Path
) -> None:
    """Prompts in chunks, prefixes from the cache, requests that are retracted."""
    (server,) = servers.get(watched(small_pool(folder, 16), tmp_path))
    oracle, chosen = AcceptanceOracle(folder), prompts[::3]
    answers = ask_twice(server, tmp_path, chosen, 48)
    judgement = judge(oracle, answers)
    check(judgement, least_steps=600)
    assert judgement.num_first > len(answers), "some request was retracted"
    assert oracle.drafted is not None
    of_text = [
        token
        for answer in answers
        for step in answer.steps
        for token in [*answer.prompt, *answer.reply.tokens][step.start + 1 : step.end]
        if token not in oracle.drafted
    ]
    print(f"{len(of_text)} accepted drafts are of no list")
    assert len(of_text) > 50
    server.flush_cache()
    with mistaken(tmp_path, "context_of_another_request"):
        found = judge(oracle, ask(server, tmp_path, chosen, greedy(48), CONCURRENCY))
    print(f"context of another request: {found}")
    assert found.wrong


@pytest.mark.slow
def test_greedy_replies_are_those_without_speculation(
    servers: ServerPool, model_folder: Path, folder: Path, prompts: Prompts
) -> None:
    pair = servers.get(plain_and_mtp(model_folder)[0], plain_and_mtp(folder)[1])
    plain, drafted = ask_both(pair, lambda server: server.generate(prompts, greedy(48)))
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert tokens_per_step(drafted) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["rejection", "exact match"])
def test_sampled_replies_have_the_models_distribution(
    servers: ServerPool, model_folder: Path, tmp_path: Path, reference, tokenizer, variant: str
) -> None:
    """Of the two digits that are drawn the list has one; the prompt, naming both, has the other."""
    digits = [token_of(tokenizer, text) for text in ALLOWED[:2]]
    listed = [token for token in range(SIZE) if token != digits[1]]
    folder = with_list(tmp_path / "nano", model_folder, sorted({*listed, digits[0]}))
    flags = REJECTION if variant == "rejection" else ()
    pair = servers.get(plain_and_mtp(model_folder)[0], plain_and_mtp(folder, mtp_flags=flags)[1])
    prompt = conversation(tokenizer, QUESTION)
    assert digits[1] in prompt
    cells = Cells(digits, length=5)
    check_distribution(pair, reference, prompt, cells, "temperature 1", NUM_DRAWS)
