"""A real 135M chat model on SGLang's NPU path: MiMo's classes serve, with transformers' tokens.

Without ASCEND_USE_FIA prompts and decode go through ATB's attention.
"""

from __future__ import annotations

import pytest
from greedy_oracle import Oracle

from npu_emulation.mtp_runs import served_by_mtp
from npu_emulation.sglang_runs import FUSED_ATTENTION, chat_prompts, requests, served
from sglang_ascend.models.catalog import model_path

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Summarise: " + "The ship left the harbour at dawn and came back with the tide. " * 10,
)


@pytest.fixture(scope="module")
def smollm2():
    return model_path("smollm2-mtp")


@pytest.fixture(scope="module")
def prompts(smollm2) -> list[list[int]]:
    return chat_prompts(smollm2, QUESTIONS)


@pytest.mark.parametrize(
    "attention",
    [pytest.param({}, id="atb"), pytest.param(FUSED_ATTENTION, id="fia", marks=pytest.mark.slow)],
)
def test_mimo_s_classes_serve_with_transformers_tokens(smollm2, prompts, attention):
    assert len(prompts[-1]) > 128, "over a page"
    report = served(smollm2, [requests(prompts, max_new_tokens=10)], environ=attention)
    assert report.names == {
        "platform": "NPUSRTPlatform",
        "scheduler_loop": "overlap",
        "model": "MiMoForCausalLM",
        "attention": "AscendAttnBackend",
        "pool": "NPUMHATokenToKVPool",
        "allocator": "NPUPagedTokenToKVPoolAllocator",
        "graph_runner": "NPUGraphRunner",
    }
    step = report.steady()
    assert (step.num_alike, step.num_kernels) == (step.num_iterations, 0)
    assert step.calls.keys() == {"launches", "graph_replays", "async_d2h", "event_syncs"}
    Oracle(smollm2).check_greedy(prompts, report.tokens)


@pytest.mark.slow
def test_mimo_s_mtp_layer_is_captured_with_the_step(smollm2, prompts):
    """SGLang's own layer assigns through a boolean mask, which stops a capture."""
    asked = requests(prompts[:1], max_new_tokens=10)
    report = served_by_mtp(smollm2, [asked], "--cuda-graph-bs-decode", "1", timeout=900)
    assert (
        report.names.items()
        >= {
            "model": "MiMoForCausalLM",
            "draft_model": "MiMoMTP",
            "speculative_worker": "MTPWorker",
            "attention": "NPUAttentionBackend",
            "draft_attention": "NPUAttentionBackend",
            "pool": "NPUMHATokenToKVPool",
        }.items()
    )
    assert report.steady().calls["graph_replays"] == 2
    Oracle(smollm2).check_greedy(prompts[:1], report.tokens)
