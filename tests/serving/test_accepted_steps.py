"""In fp32 a server accepts in every step the drafts that the MTP layer's definition gives.

Lossless replies cannot show a wrong draft, which only costs speed. acceptance_oracle.py computes
from a whole reply what each of its steps should have accepted. Prompts share prefixes and continue
earlier replies, prefill is chunked, and requests are retracted: SGLang's test switch asks for it,
and slots run out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from acceptance_oracle import AcceptanceOracle, Judgement
from disaggregated import Disaggregated, prefill_and_decode
from launched_server import LaunchedServer, ServerConfig, Tokens, greedy
from server_pairs import MODELS, TEST_TIMEOUT_S, plain_and_mtp
from server_pool import ServerPool
from serving_prompts import lossless_mix, token_stream
from watched_acceptance import Answer, ask, judge, mistaken, watched, with_parts

from benchmarks.server import free_port

CONCURRENCY = 16
NEW_TOKENS = {"nano-deepseek": 96, "smollm2-mtp": 48}
NUM_PROMPTS = {"nano-deepseek": 208, "smollm2-mtp": 40}
NUM_TIES = 1 / 1000  # of the steps, at most
# Tokens that the pool holds: those of a few requests only.
POOL = {1: 2048, 16: 2048, 128: 6144}
CHUNK = {1: 64, 16: 64, 128: 128}
RETRACTIONS = (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "23"))
NEAR_THE_END = 160  # tokens of a reply that ends where the model does
# Of a model's length, those that SGLang leaves to the drafts of a request.
RESERVED = 5

Prompts = list[list[int]]

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]
nano_deepseek = pytest.mark.parametrize("model", ["nano-deepseek"])
both_models = pytest.mark.parametrize("model", MODELS)
MISTAKES = ("hidden_of_the_row_before", "position_of_the_row_before", "keys_not_written")


@pytest.fixture(scope="module")
def steps_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture
def folder(steps_folder: Path) -> Iterator[Path]:
    """Where the processes of one test write."""
    yield steps_folder
    clear(steps_folder)


def clear(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.fixture(scope="module")
def oracles() -> dict[Path, AcceptanceOracle]:
    """By the checkpoint's folder; of one model at a time."""
    return {}


@pytest.fixture
def oracle(model_folder: Path, oracles: dict[Path, AcceptanceOracle]) -> AcceptanceOracle:
    if model_folder not in oracles:
        oracles.clear()
        oracles[model_folder] = AcceptanceOracle(model_folder)
    oracle = oracles[model_folder]
    oracle.reads_own_text, oracle.drafted_behind_transfer = True, None
    return oracle


@pytest.fixture
def prompts(tokenizer, held_out_prompts, model: str) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, NUM_PROMPTS[model])


def small_pool(model: Path, page_size: int) -> ServerConfig:
    """Requests wait, are cut into chunks and give their slots up."""
    flags = ("--chunked-prefill-size", str(CHUNK[page_size]))
    flags += ("--max-total-tokens", str(POOL[page_size]))
    flags += ("--max-running-requests", str(CONCURRENCY))
    return ServerConfig(model, mtp=True, page_size=page_size, flags=flags, variables=RETRACTIONS)


def ask_twice(
    server: LaunchedServer | Disaggregated, folder: Path, prompts: Prompts, new_tokens: int
) -> list[Answer]:
    """The prompts, then each with its reply and a few more tokens behind it."""
    first = ask(server, folder, prompts, greedy(new_tokens), CONCURRENCY)
    rng = random.Random(0)
    longer: list[Tokens] = [
        [*answer.prompt, *answer.reply.tokens, *rng.choices(answer.prompt, k=rng.randrange(1, 8))]
        for answer in first
    ]
    second = ask(server, folder, longer, greedy(new_tokens), CONCURRENCY)
    replies = [answer.reply for answer in second]
    hits = [reply.cached_tokens for reply in replies]
    print(f"{sum(map(bool, hits))} of {len(hits)} continued replies begin with cached tokens")
    return first + second


def check(judgement: Judgement, least_steps: int) -> None:
    print(judgement)
    assert judgement.wrong == ()
    assert judgement.num_steps >= least_steps
    assert judgement.num_ties <= NUM_TIES * judgement.num_steps
    # A server that accepts all or nothing would pass with any drafts.
    assert len(judgement.accepted) == 4
    assert max(judgement.accepted.values()) < 0.8 * judgement.num_steps


@nano_deepseek
@pytest.mark.parametrize("page_size", [16])
def test_every_step_accepts_what_the_definition_gives(
    servers: ServerPool,
    model_folder: Path,
    page_size: int,
    folder: Path,
    prompts: Prompts,
    oracle: AcceptanceOracle,
) -> None:
    """The short form of the test below; and each mistake in the drafts is found."""
    (server,) = servers.get_flushed(watched(small_pool(model_folder, page_size), folder))
    chosen = prompts[::8]
    answers = ask_twice(server, folder, chosen, 48)
    judgement = judge(oracle, answers)
    check(judgement, least_steps=800)
    assert judgement.num_first > len(answers), "some request was retracted"
    oracle.drafted_behind_transfer = 1
    repeated = judge(oracle, answers)
    print(f"if first chains had one draft: {repeated}")
    assert repeated.wrong
    oracle.drafted_behind_transfer = None
    for mistake in MISTAKES:
        server.flush_cache()
        with mistaken(folder, mistake):
            found = judge(oracle, ask(server, folder, chosen, greedy(48), CONCURRENCY))
        print(f"{mistake}: {found}")
        assert found.wrong


@both_models
@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_every_step_of_many(
    servers: ServerPool,
    model_folder: Path,
    model: str,
    page_size: int,
    folder: Path,
    prompts: Prompts,
    oracle: AcceptanceOracle,
) -> None:
    (server,) = servers.get_flushed(watched(small_pool(model_folder, page_size), folder))
    answers = ask_twice(server, folder, prompts, NEW_TOKENS[model])
    judgement = judge(oracle, answers)
    check(judgement, least_steps=len(answers) * NEW_TOKENS[model] // 4)
    assert judgement.num_first > len(answers), "some request was retracted"


@nano_deepseek
def test_every_step_accepts_what_the_definition_gives_whatever_k_it_has(
    servers: ServerPool,
    model_folder: Path,
    folder: Path,
    prompts: Prompts,
    oracle: AcceptanceOracle,
) -> None:
    """Most steps draft nothing and some prompts are skipped, so that the layer is shown later what
    it has not seen; and where it is not, that is found."""
    _, mtp = plain_and_mtp(model_folder, mtp_flags=("--speculative-adaptive",))
    config = watched(mtp, folder, "forced_drafts", FORCED_DRAFTS="0,0,0,0,3,3,1,0,0,2,3,0,1,1,2")
    (server,) = servers.get_flushed(config)
    chosen = prompts[::7]
    answers = ask_twice(server, folder, chosen, 48)
    judgement = judge(oracle, answers)
    print(judgement)
    assert {answer.steps[0].drafted for answer in answers} == {0, 1, 2, 3}
    assert judgement.wrong == () and judgement.num_steps >= 1500
    assert judgement.num_ties <= NUM_TIES * judgement.num_steps
    server.flush_cache()
    with mistaken(folder, "not_caught_up"):
        found = judge(oracle, ask(server, folder, chosen, greedy(48), CONCURRENCY))
    print(f"not caught up: {found}")
    assert found.wrong


@both_models
@pytest.mark.slow
def test_to_the_model_s_maximum_length(
    servers: ServerPool,
    model_folder: Path,
    folder: Path,
    tokenizer,
    held_out_prompts,
    oracle: AcceptanceOracle,
) -> None:
    length = oracle.model.config.max_position_embeddings - RESERVED
    config = ServerConfig(model_folder, mtp=True, flags=("--max-total-tokens", str(3 * length)))
    (server,) = servers.get(watched(config, folder))
    texts = [text for part in held_out_prompts.values() for text in part]
    stream = token_stream(tokenizer, texts, length)
    # All but the first find most of their tokens cached.
    prompts = [[*stream[: length - NEAR_THE_END - i], *stream[i : 2 * i]] for i in (0, 9, 40, 77)]
    answers = ask(server, folder, prompts, greedy(NEAR_THE_END), 1)
    for answer in answers:
        assert len(answer.prompt) + len(answer.reply.tokens) == length
    judgement = judge(oracle, answers)
    print(judgement)
    assert judgement.wrong == ()
    assert judgement.num_ties <= 1


@nano_deepseek
@pytest.mark.slow
def test_two_ranks(
    servers: ServerPool,
    model_folder: Path,
    folder: Path,
    prompts: Prompts,
    oracle: AcceptanceOracle,
) -> None:
    config = small_pool(model_folder, page_size=16)
    config = replace(config, flags=(*config.flags, "--tp-size", "2"))
    (server,) = servers.get(watched(config, folder))
    answers = ask_twice(server, folder, prompts[::2], 48)
    assert len(list(folder.glob("*.steps"))) == 2
    check(judge(oracle, answers), least_steps=2000)


@both_models
@pytest.mark.slow
def test_behind_a_transfer(
    servers: ServerPool,
    model_folder: Path,
    folder: Path,
    prompts: Prompts,
    oracle: AcceptanceOracle,
) -> None:
    """A prompt's cache of the layer comes from another server, and goes to the host and back where
    a request is retracted; and where it comes empty or stays behind, that is found."""
    oracle.reads_own_text, oracle.drafted_behind_transfer = False, 1
    port = free_port()
    prefill, decode = prefill_and_decode(model_folder, port)
    retracting = replace(decode, variables=(*decode.variables, *RETRACTIONS))
    running = servers.get(prefill, watched(retracting, folder, "record_returns"))
    answers = ask_twice(Disaggregated(*running, port), folder, prompts, 48)
    check(judge(oracle, answers), least_steps=len(answers) * 48 // 4)
    returned = sum(step.drafted == 0 for answer in answers for step in answer.steps)
    print(f"{returned} steps behind a retraction")
    assert returned
    assert not running[0].logged_batch_sizes("Decode")

    clear(folder)
    parts = ("record_returns", "retractions_forgotten")
    running = servers.get(prefill, watched(retracting, folder, *parts))
    answers = ask(Disaggregated(*running, port), folder, prompts[::2], greedy(48), CONCURRENCY)
    found = judge(oracle, answers)
    print(f"retractions forgotten: {found}")
    assert found.wrong

    clear(folder)
    running = servers.get(with_parts(prefill, "prompts_forgotten"), watched(decode, folder))
    answers = ask(Disaggregated(*running, port), folder, prompts[::8], greedy(48), CONCURRENCY)
    found = judge(oracle, answers)
    print(f"prompts forgotten: {found}")
    assert found.wrong
