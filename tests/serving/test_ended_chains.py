"""`SGLANG_ASCEND_DRAFT_P_MIN`: replies are those without speculation, and every chain is what the
MTP layer's definition drafts, however long it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from acceptance_oracle import AcceptanceOracle
from launched_server import ServerConfig, greedy
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp
from server_pool import ServerPool
from serving_prompts import conversation, lossless_mix
from test_accepted_steps import CONCURRENCY, NUM_TIES, ask_twice, small_pool
from test_lookup_server import check_same, with_lookup
from test_sampling_distribution import (
    ALLOWED,
    NUM_DRAWS,
    QUESTION,
    REJECTION,
    Cells,
    check_distribution,
    token_of,
)
from watched_acceptance import Answer, ask, judge, mistaken, watched

Prompts = list[list[int]]
NUM_STEPS = 5
FLAGS = ("--speculative-num-steps", str(NUM_STEPS))
ENDED = ("SGLANG_ASCEND_DRAFT_P_MIN", "0.4")

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, 64)


def ended(config: ServerConfig, flags: tuple[str, ...] = FLAGS) -> ServerConfig:
    flags = (*config.flags, *flags)
    return replace(config, flags=flags, variables=(*config.variables, ENDED))


def lengths_of(answers: list[Answer]) -> Counter[int | None]:
    return Counter(step.drafted for answer in answers for step in answer.steps)


def test_every_step_accepts_what_the_definition_gives(
    servers: ServerPool, model_folder: Path, folder: Path, prompts: Prompts
) -> None:
    """Prompts in chunks, prefixes from the cache, requests that are retracted; then one at a time,
    where each chain is as long as its own drafts are likely."""
    config = watched(ended(small_pool(model_folder, 16)), folder, "record_ends")
    (server,) = servers.get(config)
    oracle, chosen = AcceptanceOracle(model_folder, NUM_STEPS), prompts[::3]
    answers = ask_twice(server, folder, chosen, 48)
    judgement = judge(oracle, answers)
    print(judgement, lengths_of(answers))
    assert judgement.wrong == () and judgement.num_steps >= 400
    assert judgement.num_ties <= NUM_TIES * judgement.num_steps
    alone = ask(server, folder, chosen, greedy(48), 1)
    judgement = judge(oracle, alone)
    print(f"one at a time: {judgement}, {lengths_of(alone)}")
    assert judgement.wrong == ()
    assert set(lengths_of(alone)) == set(range(1, NUM_STEPS + 1))
    for mistake in ("hidden_of_the_row_before", "position_of_the_row_before"):
        server.flush_cache()
        with mistaken(folder, mistake):
            found = judge(oracle, ask(server, folder, prompts, greedy(48), CONCURRENCY))
        print(f"{mistake}: {found}")
        assert found.wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "with_lookups"),
    [
        (FLAGS, False),
        (FLAGS, True),
        ((*FLAGS, "--disable-overlap-schedule"), True),
        ((*FLAGS, "--tp-size", "2"), False),
    ],
)
def test_replies_do_not_change(
    servers: ServerPool,
    model_folder: Path,
    prompts: Prompts,
    flags: tuple[str, ...],
    with_lookups: bool,
) -> None:
    plain, mtp = plain_and_mtp(model_folder)
    config = ended(mtp, flags)
    check_same(servers.get_flushed(plain, with_lookup(config) if with_lookups else config), prompts)


@pytest.mark.slow
def test_rejection_sampling_has_the_models_distribution(
    servers: ServerPool, model_folder: Path, reference, tokenizer
) -> None:
    plain, mtp = plain_and_mtp(model_folder, mtp_flags=REJECTION)
    pair, prompt = servers.get(plain, ended(mtp)), conversation(tokenizer, QUESTION)
    digits = Cells([token_of(tokenizer, text) for text in ALLOWED[:2]], length=7)
    check_distribution(pair, reference, prompt, digits, "temperature 1", NUM_DRAWS // 4)
