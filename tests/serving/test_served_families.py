"""A checkpoint of a family, made here, is served: its replies are transformers' greedy tokens, and
each step accepts the drafts that the MTP layer's definition gives, so that every tensor of the
layer was found and the projection has its inputs in the right order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from acceptance_oracle import AcceptanceOracle
from greedy_oracle import Oracle
from launched_server import greedy
from served_families import DefinedAcceptance, write_served
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp
from server_pool import ServerPool
from tiny_targets import WORDS, write_target
from watched_acceptance import ask, judge, mistaken, watched

from sglang_ascend.training.export import export
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import new_layer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]
NUM_PROMPTS, NEW_TOKENS = 32, 40
# On CPU SGLang asks a DeepSeek-V3 for rope_scaling: nano-deepseek is one that has it.
TRAINED = (
    pytest.param("MiMoForCausalLM", marks=pytest.mark.slow),  # as smollm2-mtp
    pytest.param("Glm4MoeForCausalLM", marks=pytest.mark.slow),
    "Glm4MoeLiteForCausalLM",
)
SERVED_ONLY = (
    "Ernie4_5_MoeForCausalLM",
    pytest.param("HYV3ForCausalLM", marks=pytest.mark.slow),
    pytest.param("Qwen3MoeForCausalLM", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("family", TRAINED)
def test_tokens_and_accepted_drafts_are_those_of_the_definition(
    servers: ServerPool, tmp_path: Path, family: str
) -> None:
    target = Target.open(write_target(tmp_path / "target", family))
    export(target, new_layer(target, seed=1), folder := tmp_path / "model")
    check_served(servers, tmp_path / "steps", folder, AcceptanceOracle(folder))


@pytest.mark.parametrize("family", SERVED_ONLY)
def test_a_family_that_is_not_trained_is_served_as_defined(
    servers: ServerPool, tmp_path: Path, family: str
) -> None:
    folder = write_served(tmp_path / "model", family)
    check_served(servers, tmp_path / "steps", folder, DefinedAcceptance(folder, family))


def check_served(servers: ServerPool, steps: Path, folder: Path, oracle: AcceptanceOracle) -> None:
    steps.mkdir()
    (server,) = servers.get(watched(plain_and_mtp(folder)[1], steps))
    rng = random.Random(0)
    prompts = [rng.choices(range(len(WORDS)), k=rng.randrange(2, 60)) for _ in range(NUM_PROMPTS)]
    sampling = greedy(NEW_TOKENS) | {"ignore_eos": True}
    answers = ask(server, steps, prompts, sampling, 8)

    exact = Oracle(folder)
    judged = [exact.greedy(answer.prompt, answer.reply.tokens) for answer in answers]
    assert [one.wrong for one in judged] == [[]] * NUM_PROMPTS
    assert sum(one.num_ties for one in judged) < NUM_PROMPTS * NEW_TOKENS / 10

    found = judge(oracle, answers)
    print(found)
    assert found.wrong == () and found.num_steps > 300
    assert sum(count for drafts, count in found.accepted.items() if drafts) > 10
    with mistaken(steps, "hidden_of_the_row_before"):
        assert judge(oracle, ask(server, steps, prompts, sampling, 8)).wrong
