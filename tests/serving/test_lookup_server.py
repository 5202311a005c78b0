"""`SGLANG_ASCEND_LOOKUP_DRAFTS`: replies are those without speculation, and every chain is what its
source drafts, wherever requests begin, wait, share a prefix or begin again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain, cycle, islice
from pathlib import Path

import pytest
import requests
from acceptance_oracle import AcceptanceOracle, Judgement
from launched_server import LaunchedServer, Reply, ServerConfig, greedy
from server_pairs import TEST_TIMEOUT_S, ask_both, plain_and_mtp
from server_pool import ServerPool
from serving_prompts import conversation, lossless_mix
from test_accepted_steps import CONCURRENCY, NUM_TIES, ask_twice, small_pool
from test_sampling_distribution import (
    ALLOWED,
    MAX_P_BROKEN,
    NUM_DRAWS,
    REJECTION,
    Cells,
    check_distribution,
    p_of,
    token_of,
)
from watched_acceptance import Answer, ask, judge, mistaken, watched

Prompts = list[list[int]]
LOOKUP = ("SGLANG_ASCEND_LOOKUP_DRAFTS", "8")
ADAPTIVE = ("--speculative-adaptive",)
# K of step 1, 2, ...
CHANGING = "0,0,0,0,3,3,1,0,0,2,3,0,1,1,2"

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


def with_lookup(config: ServerConfig) -> ServerConfig:
    return replace(config, variables=(*config.variables, LOOKUP))


def check(judgement: Judgement, answers: list[Answer], least_steps: int) -> None:
    looked_up = [step for answer in answers for step in answer.steps if step.is_lookup]
    lengths = {step.drafted for step in looked_up}
    whole = sum(step.accepted >= (step.drafted or 0) for step in looked_up)
    print(f"{judgement}; {len(looked_up)} looked up, {whole} of them kept whole, {lengths} drafts")
    assert judgement.wrong == ()
    assert judgement.num_steps >= least_steps
    assert judgement.num_ties <= NUM_TIES * judgement.num_steps
    assert judgement.num_steps / 20 < len(looked_up) < judgement.num_steps * 9 / 10
    assert 0 < whole < len(looked_up) and len(lengths) > 1


def test_every_step_accepts_what_its_source_gives(
    servers: ServerPool, model_folder: Path, folder: Path, prompts: Prompts
) -> None:
    """Prompts in chunks, prefixes from the cache, requests that are retracted."""
    config = watched(small_pool(model_folder, 16), folder, "record_lookups")
    (server,) = servers.get(with_lookup(config))
    oracle, chosen = AcceptanceOracle(model_folder), prompts[::2]
    answers = ask_twice(server, folder, chosen, 48)
    judgement = judge(oracle, answers)
    check(judgement, answers, least_steps=600)
    assert judgement.num_first > len(answers), "some request was retracted"
    # Requests that are alone skip the MTP layer wherever they are looked up.
    alone = judge(oracle, ask(server, folder, chosen, greedy(64), 1))
    print(f"one at a time: {alone}")
    assert alone.wrong == ()
    longer = [answer.prompt for answer in answers[len(chosen) :]]  # of which more is looked up
    for mistake, concurrency in (("history_off_by_one", CONCURRENCY), ("not_caught_up", 1)):
        server.flush_cache()
        with mistaken(folder, mistake):
            found = judge(oracle, ask(server, folder, longer, greedy(64), concurrency))
        print(f"{mistake}: {found}")
        assert found.wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "flags"),
    [
        (1, ()),
        (128, ()),
        (16, ("--disable-overlap-schedule",)),
        (16, ("--tp-size", "2")),
    ],
)
def test_every_step_of_many(
    servers: ServerPool,
    model_folder: Path,
    folder: Path,
    prompts: Prompts,
    page_size: int,
    flags: tuple[str, ...],
) -> None:
    config = watched(small_pool(model_folder, page_size), folder, "record_lookups")
    config = with_lookup(replace(config, flags=(*config.flags, *flags)))
    (server,) = servers.get(config)
    answers = ask_twice(server, folder, prompts, 64)
    check(judge(AcceptanceOracle(model_folder), answers), answers, least_steps=2000)


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--enable-mixed-chunk",), marks=pytest.mark.slow)]
)
def test_replies_do_not_change_and_say_what_their_drafts_came_from(
    servers: ServerPool,
    model_folder: Path,
    folder: Path,
    prompts: Prompts,
    flags: tuple[str, ...],
) -> None:
    """A lookup is verified wherever there is one, right or wrong."""
    plain, mtp = plain_and_mtp(model_folder, mtp_flags=("--enable-metrics", *flags))
    always = watched(mtp, folder, "record_lookups", ALWAYS_LOOKUP="1")
    pair = servers.get_flushed(plain, with_lookup(always))
    check_same(pair, prompts)
    check_both_drafted(pair[1])
    assert "Lookup drafts accepted by position: " in pair[1].log()
    check_end_of_context(pair, model_folder, prompts)


def check_end_of_context(pair: list[LaunchedServer], folder: Path, prompts: Prompts) -> None:
    """Of a reply whose length nobody gave; at its end a step may reserve more slots than positions
    are left."""
    length = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    stream = list(islice(cycle(chain.from_iterable(prompts)), length - 40))
    to_the_end = {"temperature": 0, "max_new_tokens": None, "ignore_eos": True}
    texts = [stream[i:] for i in range(4)]
    expected, found = ask_both(pair, lambda server: server.generate_each(texts, to_the_end, 2))
    assert [reply.tokens for reply in found] == [reply.tokens for reply in expected]
    assert all(len(reply.tokens) > 30 for reply in found)


def check_same(pair: list[LaunchedServer], prompts: Prompts) -> None:
    """Greedy and seeded replies, one by one and many at once."""
    sampled = {"temperature": 0.9, "top_p": 0.9, "max_new_tokens": 24, "sampling_seed": 7}
    for sampling in (greedy(40), sampled):
        for concurrency, chosen in ((1, prompts[:8]), (16, prompts)):

            def question(server: LaunchedServer) -> list[Reply]:
                return server.generate_each(chosen, sampling, concurrency)  # noqa: B023

            expected, found = ask_both(pair, question)
            assert [reply.tokens for reply in found] == [reply.tokens for reply in expected]


@pytest.mark.slow
def test_every_step_accepts_what_its_source_gives_whatever_k_it_has(
    servers: ServerPool, model_folder: Path, folder: Path, prompts: Prompts
) -> None:
    """With `--speculative-adaptive`: beside chains of 0 to 3 drafts, and skipped prompts."""
    _, mtp = plain_and_mtp(model_folder, mtp_flags=("--enable-metrics", *ADAPTIVE))
    config = watched(mtp, folder, "forced_drafts", "record_lookups", FORCED_DRAFTS=CHANGING)
    (server,) = servers.get_flushed(with_lookup(config))
    oracle, chosen = AcceptanceOracle(model_folder), prompts[::4]
    answers = ask_twice(server, folder, chosen, 48)
    check(judge(oracle, answers), answers, least_steps=600)
    assert {step.drafted for answer in answers for step in answer.steps} >= {0, 1, 2, 3, 8}
    check_both_drafted(server)
    server.flush_cache()
    with mistaken(folder, "not_caught_up"):
        found = judge(oracle, ask(server, folder, chosen, greedy(48), CONCURRENCY))
    print(f"not caught up: {found}")
    assert found.wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({"FORCED_DRAFTS": "random", "ALWAYS_LOOKUP": "1"}, ()),
        ({}, ()),
        ({}, ("--tp-size", "2")),
    ],
)
def test_replies_do_not_change_where_k_changes_too(
    servers: ServerPool,
    model_folder: Path,
    folder: Path,
    prompts: Prompts,
    variables: dict[str, str],
    flags: tuple[str, ...],
) -> None:
    """Told, and by its own choice, which two ranks make by their own clocks."""
    plain, mtp = plain_and_mtp(model_folder, mtp_flags=(*ADAPTIVE, *flags))
    parts = ("forced_drafts", "record_lookups") if variables else ()
    config = watched(mtp, folder, *parts, **variables)
    pair = servers.get_flushed(plain, with_lookup(config))
    check_same(pair, prompts)
    assert "Lookup drafts accepted by position: " in pair[1].log()


def check_both_drafted(server: LaunchedServer) -> None:
    of_lookup, accepted, of_mtp = (
        counted(server, name)
        for name in ("lookup_drafts_total", "accepted_lookup_drafts_total", "drafts_total")
    )
    print(f"{accepted:.0f} of {of_lookup:.0f} lookups kept, {of_mtp:.0f} drafts of the MTP layer")
    assert 0 < accepted < of_lookup
    assert of_mtp > 0


def counted(server: LaunchedServer, name: str) -> float:
    """Over all positions."""
    lines = requests.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    values = (line.split()[-1] for line in lines if line.startswith(f"sglang_ascend:{name}{{"))
    return sum(map(float, values))


@pytest.fixture
def seven_digits(tokenizer) -> Cells:
    return Cells([token_of(tokenizer, text) for text in ALLOWED[:2]], length=7)


@pytest.fixture
def repeated_digits(tokenizer) -> list[int]:
    """Digits follow two pairs of them, and where another pair was emitted nothing is found, so that
    a batch has chains of both kinds."""
    return conversation(tokenizer, "Which is larger, 5577 or 2?")


def rejecting(model_folder: Path, folder: Path, *parts: str, **variables: str) -> ServerConfig:
    _, mtp = plain_and_mtp(model_folder, mtp_flags=("--enable-metrics", *REJECTION))
    return with_lookup(watched(mtp, folder, "record_lookups", *parts, **variables))


@pytest.mark.slow
@pytest.mark.parametrize("always", [{}, {"ALWAYS_LOOKUP": "1"}])
def test_rejection_sampling_has_the_models_distribution_where_chains_are_looked_up(
    servers: ServerPool,
    model_folder: Path,
    reference,
    folder: Path,
    repeated_digits: list[int],
    seven_digits: Cells,
    always: dict[str, str],
) -> None:
    pair = servers.get(plain_and_mtp(model_folder)[0], rejecting(model_folder, folder, **always))
    asked = (pair, reference, repeated_digits, seven_digits, "temperature 1", NUM_DRAWS // 4)
    check_distribution(*asked)
    check_both_drafted(pair[1])


@pytest.mark.slow
def test_a_lookup_that_is_judged_as_drawn_is_found(
    servers: ServerPool,
    model_folder: Path,
    reference,
    folder: Path,
    repeated_digits: list[int],
    seven_digits: Cells,
) -> None:
    """The control of the test above."""
    config = rejecting(model_folder, folder, "lookups_judged_as_drawn", ALWAYS_LOOKUP="1")
    (server,) = servers.get(config)
    # Or a reply that the model cannot give.
    with pytest.raises(AssertionError):
        assert p_of(server, reference, repeated_digits, seven_digits) > MAX_P_BROKEN
