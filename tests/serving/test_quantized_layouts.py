"""Every layout is served as what its tests' packer wrote: on one rank and on two, without and with
speculation, linears and experts.

Weight-only layouts have transformers' log-probabilities of the decoded weights. Layouts that round
inputs have the distributions of a float64 forward that rounds them by the definition.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from pathlib import Path

import packers
import pytest
from launched_server import LaunchedServer, Reply, greedy
from offline_model import ALL_ROWS, MAX_KL, OfflineModel, largest_difference, mean_kl
from quantized_checkpoints import LAYOUTS, Write, write_decoded
from server_pairs import TEST_TIMEOUT_S, ask_both, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import lossless_mix
from test_quantized import MAX_DIFFERENCE, same_but_for_ties

NEW_TOKENS = 16
NUM_PROMPTS = 16
NUM_CONTROL = 4
WEIGHT_ONLY = [name for name, layout in LAYOUTS.items() if layout.linears.round_input is None]
# Of each layout the mistakes that its codes, scales and zero points allow. W8A8_DYNAMIC and a head
# are in test_quantized.
MISTAKES = {
    "W8A16": ["scale off by one row"],
    "W4A8": ["scale off by one row"],
    "gptq": list(packers.MISTAKES),
    "awq": list(packers.MISTAKES),
    "compressed int4": ["swapped nibbles", "scale off by one row"],
    "compressed fp8": ["scale off by one row"],
    "block fp8": ["scale off by one row"],
    "W8A8 static": ["scale off by one row"],
    "W8A8 rotated": ["scale off by one row"],
    "W4A4": ["scale off by one row"],
    "HiFloat8": ["scale off by one row"],
    "MXFP4": ["scale off by one row"],
    "compressed int8": ["scale off by one row"],
}

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]

Prompts = list[list[int]]


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, 50)[:NUM_PROMPTS]


def ask(server: LaunchedServer, prompts: Prompts) -> list[Reply]:
    return server.generate(prompts, greedy(NEW_TOKENS), **ALL_ROWS)


def distance(offline: OfflineModel, layout: str, prompts: Prompts, replies: list[Reply]) -> float:
    """In units of what is allowed; of layouts that round inputs, over the replies that their
    definition decides."""
    if layout in WEIGHT_ONLY:
        pairs = [*map(offline.rows_of, prompts, replies)]
        return largest_difference(pairs) / MAX_DIFFERENCE
    decided = [*map(offline.decides, prompts, replies)]
    assert sum(decided) > len(decided) / 2
    asked = zip(compress(prompts, decided), compress(replies, decided), strict=True)
    return mean_kl(offline.rows_of(*each) for each in asked) / MAX_KL


@pytest.mark.parametrize("layout", MISTAKES)
def test_a_layout_is_served_as_what_was_packed(
    servers: ServerPool,
    write: Write,
    model_folder: Path,
    quantized_folder: Path,
    prompts: Prompts,
    layout: str,
) -> None:
    pair = servers.get_flushed(*plain_and_mtp(write(layout)))
    offline = OfflineModel(
        write_decoded(model_folder, quantized_folder / f"{layout}-decoded", layout), layout
    )
    plain, mtp = ask_both(pair, lambda server: ask(server, prompts))
    for replies in (plain, mtp):
        found = distance(offline, layout, prompts, replies)
        print(f"{layout}: {found:.2g} of what is allowed")
        assert found < 1
    if layout in WEIGHT_ONLY:
        assert [reply.tokens for reply in mtp] == [reply.tokens for reply in plain]
    assert same_but_for_ties(plain, mtp)
    assert tokens_per_step(mtp) > 1.5
    few = prompts[:NUM_CONTROL]
    for mistake in MISTAKES[layout]:
        pair[0].update_weights(write(layout, mistake=mistake))
        found = distance(offline, layout, few, ask(pair[0], few))
        print(f"{layout}, {mistake}: {found:.2g} of what is allowed")
        assert found > 3


@pytest.mark.parametrize("layout", ["W8A16", "compressed fp8", "gptq"])
@pytest.mark.parametrize("variant", ["tensor-parallel"])
def test_two_ranks_have_the_log_probabilities_of_the_decoded_weights(
    servers: ServerPool,
    write: Write,
    model_folder: Path,
    quantized_folder: Path,
    prompts: Prompts,
    layout: str,
    variant: str,
) -> None:
    def two_ranks(config):
        return replace(config, flags=(*config.flags, "--tp-size", "2"))

    folder, few = write(layout), prompts[:NUM_CONTROL]
    decoded = quantized_folder / f"{layout}-decoded-for-ranks"
    offline = OfflineModel(write_decoded(model_folder, decoded, layout), layout)
    said = []
    # One after the other: a pair would have four processes on two cores.
    for config in map(two_ranks, plain_and_mtp(folder)):
        (server,) = servers.get_flushed(config)
        assert server.info()["tp_size"] == 2
        said.append(ask(server, prompts))
        found = distance(offline, layout, prompts, said[-1])
        print(f"{layout}, two ranks: {found:.2g} of what is allowed")
        assert found < 1
    assert [reply.tokens for reply in said[0]] == [reply.tokens for reply in said[1]]
    assert tokens_per_step(said[1]) > 1.5
    server.update_weights(write(layout, mistake="scale off by one row"))
    assert distance(offline, layout, few, ask(server, few)) > 10
