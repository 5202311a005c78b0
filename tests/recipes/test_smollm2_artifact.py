"""The committed MTP layer of smollm2 keeps its promise on chat prompts that training never saw.

Replies are the target's own greedy ones; drafts are counted as lossless verification counts them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ascend.models.catalog import model_path
from sglang_ascend.models.smollm2 import ARTIFACT
from sglang_ascend.speculative.vocabulary.context import MOST_UNLISTED
from sglang_ascend.speculative.vocabulary.file import read_draft_vocabulary
from sglang_ascend.training.acceptance import Output, evaluate
from sglang_ascend.training.generation.outputs import greedy_outputs
from sglang_ascend.training.generation.prompt_files import read_prompts
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.layer import MTPLayer
from sglang_ascend.training.targets.start import new_layer, own_layer

PROMPTS = Path(__file__).parents[1] / "data" / "heldout_chat.json"
MAX_NEW_TOKENS = 192
PROMISED_ACCEPTANCE = 2.2
NUM_DOMAINS = 8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.open(model_path("smollm2-mtp"))


@pytest.fixture(scope="module")
def outputs(target: Target) -> list[Output]:
    return greedy_outputs(target, read_prompts(PROMPTS), MAX_NEW_TOKENS)


def measure(target: Target, layer: MTPLayer, outputs: list[Output]) -> dict:
    embedding, head = target.embedding_and_head()
    draft_ids = read_draft_vocabulary(ARTIFACT, len(embedding))
    return evaluate(layer, outputs, embedding, head, 3, draft_ids)


def test_drafts_help_on_unseen_chat_prompts(target: Target, outputs: list[Output]) -> None:
    report = measure(target, own_layer(target), outputs)
    print(json.dumps(report, indent=1))
    figures = report["all"]
    domains = {output.domain for output in outputs}
    assert len(domains) == NUM_DOMAINS
    assert set(report) == {"all", "looping outputs", *domains}
    assert figures["outputs"] > len(outputs) / 2  # loops are left out; they flatter any draft
    assert figures["acceptance_length"] >= PROMISED_ACCEPTANCE
    assert figures["acceptance_length"] > figures["lookup_baseline"] + 0.4


def test_the_list_is_short_and_joined_by_the_text_loses_little(
    target: Target, outputs: list[Output]
) -> None:
    """At most 4,096 tokens with all that is remembered of a text, for 98 % of what all would give.
    The list alone, which is what drafts on an NPU, gives less."""
    embedding, head = target.embedding_and_head()
    listed = read_draft_vocabulary(ARTIFACT, len(embedding))
    assert listed is not None
    assert len(listed) + MOST_UNLISTED <= 4096
    whole, joined, alone = (
        evaluate(own_layer(target), outputs, embedding, head, 3, ids, with_context)["all"]
        for ids, with_context in ((None, False), (listed, True), (listed, False))
    )
    lengths = [figures["acceptance_length"] for figures in (whole, joined, alone)]
    print(f"tokens per forward: {lengths} of all tokens, list and text, and the list")
    assert lengths[1] >= 0.98 * lengths[0]
    assert lengths[0] > lengths[1] > lengths[2] >= 1.9


def test_an_untrained_layer_does_not_help(target: Target, outputs: list[Output]) -> None:
    assert measure(target, new_layer(target, seed=0), outputs)["all"]["acceptance_length"] < 1.1
