"""Under data-parallel attention each rank, or each two that share a request's heads, has its own
requests, and shares experts and head with the others: whatever another rank has to do, the tokens
are transformers'. Below, as in a request's routed_dp_rank, a rank may be two of four.

Tokens of fp32 have no ties here, so greedy ones are compared one by one; sampled ones by the
probability that the server says they had.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch
from eight_heads import write_with_eight_heads
from launched_server import LaunchedServer, Reply, ServerConfig, greedy
from reference_model import ReferenceModel
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import lossless_mix, ragged_prompts

from sglang_ascend.models.catalog import model_path

NEW_TOKENS = 24
SAMPLED = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
# As tests/serving/test_processes.py has it for two ranks that share every request.
MAX_DIFFERENCE = 2e-4
MIN_TOKENS_PER_STEP = 1.3
# A rank that waits for one that does not come gives up, and a client that waits for it.
RANKS_GIVE_UP_S, CLIENT_GIVES_UP_S = 20, 60

SLOW = pytest.mark.slow
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]
TWO = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
# Two for each request's heads.
FOUR = ("--tp-size", "4", "--dp-size", "2", "--enable-dp-attention")
LOCAL_HEAD = ("--enable-dp-lm-head", "--moe-dense-tp-size", "1")
VARIANTS = {
    "shared-head": TWO,
    "local-head": (*TWO, *LOCAL_HEAD),
    "four-with-shared-head": FOUR,
    "four-with-local-heads": (*FOUR, *LOCAL_HEAD),
}
each_variant = pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=SLOW) for name in VARIANTS]
)
# One of them, which docs/deployment.md starts, whenever tests run.
each_variant_or_one = pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=[SLOW] * (name != "local-head")) for name in VARIANTS],
)

Prompts = list[list[int]]


def config(folder: Path, flags: tuple[str, ...]) -> ServerConfig:
    mtp = plain_and_mtp(folder)[1]
    return replace(mtp, flags=(*mtp.flags, *flags))


@pytest.fixture(scope="module")
def eight_heads(tmp_path_factory) -> Path:
    return write_with_eight_heads(
        model_path("nano-deepseek"), tmp_path_factory.mktemp("eight-heads") / "nano-deepseek"
    )


@pytest.fixture
def model_folder(model: str, eight_heads: Path) -> Path:
    return eight_heads


@pytest.fixture
def ranks(servers: ServerPool, model_folder: Path, variant: str) -> LaunchedServer:
    (server,) = servers.get_flushed(config(model_folder, VARIANTS[variant]))
    return server


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, 24)


@pytest.fixture
def unrelated_prompts(tokenizer, held_out_prompts) -> Prompts:
    """No two share a prefix: what one sampled cannot be cached for another."""
    return ragged_prompts(tokenizer, [t for texts in held_out_prompts.values() for t in texts])


def ask(server: LaunchedServer, rank: int, prompts: Prompts, sampling, **fields) -> list[Reply]:
    """All at once, of one rank."""
    return server.generate(prompts, sampling, routed_dp_rank=rank, **fields)


def at_once(*asked):
    """What each of the functions returns, called side by side."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return [running.result() for running in [pool.submit(one) for one in asked]]


def wrong_tokens(reference: ReferenceModel, prompts: Prompts, replies: list[Reply]) -> int:
    """Greedy tokens that are not transformers', given those before them."""
    return sum(
        int(
            (
                reference.rows([*prompt, *reply.tokens]).of_output(len(prompt)).top_tokens[:, 0]
                != torch.tensor(reply.tokens)
            ).sum()
        )
        for prompt, reply in zip(prompts, replies, strict=True)
    )


def batches(server: LaunchedServer, since: int) -> list[tuple[int, str, int]]:
    """(rank, kind, requests) of every batch that was logged behind ``since``, in order."""
    lines = re.findall(
        r" DP(\d)[^\]]*\] (Decode|Prefill) batch, #(?:running-req|new-seq): (\d+)",
        server.log()[since:],
    )
    return [(int(rank), kind, int(count)) for rank, kind, count in lines]


@each_variant_or_one
def test_uneven_batches(ranks, prompts, reference, variant) -> None:
    since = len(ranks.log())
    many, few = prompts[:11], prompts[11:14]
    of_many, of_few = at_once(
        lambda: ask(ranks, 0, many, greedy(NEW_TOKENS)),
        lambda: ask(ranks, 1, few, greedy(2 * NEW_TOKENS)),
    )
    assert wrong_tokens(reference, [*many, *few], [*of_many, *of_few]) == 0
    assert tokens_per_step([*of_many, *of_few]) > MIN_TOKENS_PER_STEP
    decoded = {(rank, count) for rank, kind, count in batches(ranks, since) if kind == "Decode"}
    assert max(count for rank, count in decoded if rank == 0) > 3
    assert {rank for rank, _ in decoded} == {0, 1}


@each_variant
@pytest.mark.parametrize("busy", [0, 1])
def test_an_idle_rank_steps_beside_the_other(ranks, prompts, reference, busy, variant) -> None:
    since = len(ranks.log())
    replies = ask(ranks, busy, prompts[14:17], greedy(NEW_TOKENS))
    assert wrong_tokens(reference, prompts[14:17], replies) == 0
    assert {rank for rank, _, _ in batches(ranks, since)} == {busy}


@each_variant_or_one
def test_one_rank_samples_and_the_other_does_not(
    ranks, unrelated_prompts, reference, variant
) -> None:
    sampled, likeliest = unrelated_prompts[:8], unrelated_prompts[8:14]
    drawn, chosen = at_once(
        lambda: ask(ranks, 0, sampled, SAMPLED, return_logprob=True, top_logprobs_num=2),
        lambda: ask(ranks, 1, likeliest, greedy(NEW_TOKENS)),
    )
    assert wrong_tokens(reference, likeliest, chosen) == 0
    assert wrong_tokens(reference, sampled, drawn) > 8
    worst = max(map(reference.largest_difference, sampled, drawn))
    print(f"largest difference: {worst:.2e}")
    assert worst < MAX_DIFFERENCE


@each_variant
def test_one_rank_prefills_while_the_other_decodes(ranks, prompts, reference, variant) -> None:
    since = len(ranks.log())
    of_decode, of_prefills = at_once(
        lambda: ask(ranks, 0, prompts[:2], greedy(96)),
        lambda: [ask(ranks, 1, [prompt], greedy(4))[0] for prompt in prompts[2:14]],
    )
    assert wrong_tokens(reference, prompts[:14], [*of_decode, *of_prefills]) == 0
    kinds = [(rank, kind) for rank, kind, _ in batches(ranks, since)]
    decodes = [place for place, kind in enumerate(kinds) if kind == (0, "Decode")]
    between = kinds[decodes[0] : decodes[-1]]
    assert between.count((1, "Prefill")) >= 3


def broken(server: ServerConfig, mistake: str) -> ServerConfig:
    return replace(
        server,
        python_path=Path(__file__).parent / "broken_processes",
        variables=(*server.variables, ("BROKEN_PROCESSES", mistake)),
    )


@SLOW
@pytest.mark.parametrize(
    "variant", ["nothing", "an_idle_rank_skips_a_forward", "ranks_choose_their_own_rows"]
)
def test_ranks_that_part_are_found(servers, model_folder, prompts, reference, variant) -> None:
    """The control: no reply comes, or a wrong one; but where nothing is broken, the right ones."""
    waits = ("--skip-server-warmup", "--dist-timeout", str(RANKS_GIVE_UP_S))
    unchecked = (("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false"),)
    two = replace(config(model_folder, (*TWO, *waits)), variables=unchecked)
    (server,) = servers.get(broken(two, variant))
    asked = {
        "input_ids": prompts[:3],
        "sampling_params": greedy(NEW_TOKENS),
        "routed_dp_rank": 1,
    }
    try:
        found = requests.post(f"{server.url}/generate", json=asked, timeout=CLIENT_GIVES_UP_S)
        replies = [Reply.from_json(item) for item in found.json()]
    except requests.RequestException as error:
        print(f"{error}; {server.log_tail()}")
        assert variant != "nothing"
        assert "gloo" in server.log()  # which says what one rank waited for, or which rank is gone
        return
    finally:
        servers.stop()
    assert bool(wrong_tokens(reference, prompts[:3], replies)) == (variant != "nothing")


@SLOW
@pytest.mark.parametrize("variant", ["nothing", "ranks_draw_apart"])
def test_ranks_of_a_request_that_draw_apart_are_found(
    servers, model_folder, unrelated_prompts, reference, variant
) -> None:
    """The control: a rank that runs on a token of its own spoils the sums of both; where nothing is
    broken, they are right."""
    (server,) = servers.get(broken(config(model_folder, FOUR), variant))
    prompts = unrelated_prompts[:8]
    replies = ask(server, 1, prompts, SAMPLED, return_logprob=True, top_logprobs_num=2)
    worst = max(map(reference.largest_difference, prompts, replies))
    print(f"largest difference: {worst:.2e}")
    assert worst > 500 * MAX_DIFFERENCE if variant != "nothing" else worst < MAX_DIFFERENCE
