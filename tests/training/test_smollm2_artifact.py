"""The committed MTP layer of smollm2 keeps its promise on chat prompts that training never saw.

Replies are the target's own greedy ones; drafts are counted as lossless verification counts them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sglang_ascend.models.catalog import model_path
from sglang_ascend.models.smollm2 import ARTIFACT
from sglang_ascend.speculative.vocabulary import read_draft_vocabulary
from sglang_ascend.training.acceptance import Output, evaluate
from sglang_ascend.training.mtp_mimo import load_layer, new_layer
from sglang_ascend.training.outputs import greedy_outputs, read_prompts

PROMPTS = Path(__file__).parents[1] / "data" / "heldout_chat.json"
MAX_NEW_TOKENS = 192
PROMISED_ACCEPTANCE = 1.8
NUM_DOMAINS = 8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_path("smollm2-mtp")


@pytest.fixture(scope="module")
def outputs(folder: Path) -> list[Output]:
    return greedy_outputs(folder, read_prompts(PROMPTS), MAX_NEW_TOKENS)


def measure(layer: torch.nn.Module, embedding: torch.Tensor, outputs: list[Output]) -> dict:
    draft_ids = read_draft_vocabulary(ARTIFACT, len(embedding))
    return evaluate(layer, outputs, embedding, embedding, 3, draft_ids)


def test_drafts_help_on_unseen_chat_prompts(folder: Path, outputs: list[Output]) -> None:
    layer, embedding = load_layer(folder, ARTIFACT / "mtp.safetensors")
    report = measure(layer, embedding, outputs)
    print(json.dumps(report, indent=1))
    figures = report["all"]
    assert len(report) == NUM_DOMAINS + 1
    assert figures["outputs"] > len(outputs) / 2  # loops are left out; they flatter any draft
    assert figures["acceptance_length"] >= PROMISED_ACCEPTANCE
    assert figures["acceptance_length"] > figures["lookup_baseline"] + 0.4


def test_an_untrained_layer_does_not_help(folder: Path, outputs: list[Output]) -> None:
    layer, embedding = new_layer(folder, seed=0)
    assert measure(layer, embedding, outputs)["all"]["acceptance_length"] < 1.1
