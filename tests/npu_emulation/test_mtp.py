"""MTP's step served whole on the emulated NPU: our classes, transformers' tokens, no host waits.

The models are a DeepSeek of random weights, of whose drafts some are right, and nano-deepseek.
Tokens are judged by greedy_oracle.py. Label of all this: "host path on emulated NPU".
"""

from __future__ import annotations

import pytest
from greedy_oracle import Oracle

from npu_emulation.mtp_runs import (
    MTP,
    SHORT_CONTEXT,
    check_budget,
    decodes,
    served_by_mtp,
    tokens_per_step,
)
from npu_emulation.report import Report
from npu_emulation.sglang_runs import (
    EAGER,
    FUSED_ATTENTION,
    INTERPRETED_MLA,
    chat_prompts,
    prompt,
    requests,
    served,
    start,
)
from sglang_ascend.models.catalog import model_path

PAGE = 128
GRAPH_OF_4 = ("--cuda-graph-bs-decode", "4")
CHUNKS_OF_A_PAGE = ("--chunked-prefill-size", str(PAGE))
SHORT = [prompt(length, seed) for seed, length in enumerate((9, 14, 19))]
# A page and less in two chunks, one that is given its next page while it decodes (the step
# reserves 8 slots ahead), one that begins the next page with a verified row.
LONG = [prompt(length, seed) for seed, length in enumerate((200, 116, 126), start=3)]
EXTENDED = [[*LONG[0], 77, 78, 79]]  # shares a full page with a prompt that was served
# More than the largest graph holds, that end one after another.
MANY = [prompt(5 + seed, seed) for seed in range(10, 15)]
NUM_TOKENS = (2, 4, 6, 8, 10)
WAVES = [
    requests(SHORT, max_new_tokens=16),
    requests(LONG, max_new_tokens=12),
    requests(EXTENDED, max_new_tokens=4),
    [
        request
        for tokens, new in zip(MANY, NUM_TOKENS, strict=True)
        for request in requests([tokens], max_new_tokens=new)
    ],
]
PROMPTS = [*SHORT, *LONG, *EXTENDED, *MANY]
TEMPERATURE, TOP_P = 0.8, 0.9
SAMPLED = requests(SHORT, temperature=TEMPERATURE, top_p=TOP_P, max_new_tokens=16)
SAMPLED_WAVE = len(WAVES)

CLASSES = {
    "platform": "NPUSRTPlatform",
    "scheduler_loop": "overlap",
    "speculative_worker": "MTPWorker",
    "attention": "NPUAttentionBackend",
    "draft_attention": "NPUAttentionBackend",
    "allocator": "NPUPagedTokenToKVPoolAllocator",
    "draft_allocator": "NPUPagedTokenToKVPoolAllocator",
    "graph_runner": "none",  # the worker has the step's own graphs
}
DEEPSEEK = CLASSES | {
    "model": "DeepseekV3ForCausalLM",
    "draft_model": "DeepseekV3ForCausalLMNextN",
    "pool": "NPUMLATokenToKVPool",
    "draft_pool": "NPUMLATokenToKVPool",
}
QUESTIONS = ("What is 12 plus 30?", "Who are you?", "Is 7 larger than 3?")


@pytest.fixture(scope="module")
def replayed(guessable) -> Report:
    return served_by_mtp(guessable, [*WAVES, SAMPLED], *GRAPH_OF_4, *CHUNKS_OF_A_PAGE)


@pytest.fixture(scope="module")
def eager(guessable) -> Report:
    return served_by_mtp(guessable, WAVES, *EAGER, *CHUNKS_OF_A_PAGE)


@pytest.fixture(scope="module")
def plain(guessable) -> Report:
    return served(guessable, [WAVES[0], SAMPLED], GRAPH_OF_4, FUSED_ATTENTION)


def test_our_worker_and_backend_serve_a_deepseek_and_its_mtp_layer(replayed):
    assert replayed.names.items() >= DEEPSEEK.items()


def test_greedy_tokens_are_transformers_on_pages_chunks_prefixes_and_padded_graphs(replayed, exact):
    exact.check_greedy(PROMPTS, replayed.tokens[: len(PROMPTS)])
    assert replayed.cached_tokens[: len(PROMPTS)] == [
        PAGE if tokens in EXTENDED else 0 for tokens in PROMPTS
    ]


@pytest.mark.slow
@pytest.mark.parametrize("is_nano", [True, False])
def test_a_start_warns_of_latents_that_no_card_takes(guessable, is_nano):
    folder = model_path("nano-deepseek") if is_nano else guessable
    waves = [requests(SHORT[:1], max_new_tokens=1)]
    process, report = start(folder, waves, (*MTP, *SHORT_CONTEXT, *EAGER), FUSED_ATTENTION)
    assert report is not None
    assert ("take 512 + 64: expect CANN to refuse them" in process.stderr) == is_nano


def test_every_call_was_checked(replayed):
    assert replayed.unchecked == []


def test_drafts_are_kept_and_not(replayed):
    assert 1.1 < tokens_per_step(replayed) < 3.9


@pytest.mark.slow
def test_without_graphs_and_overlap_too(eager, exact):
    assert eager.names.items() >= (DEEPSEEK | {"scheduler_loop": "normal"}).items()
    assert not any("graph_replays" in turn.calls for turn in eager.iterations)
    exact.check_greedy(PROMPTS, eager.tokens)


def test_a_batch_is_replayed_where_a_graph_holds_it(replayed):
    """Of five requests none, of what is left of them and of three requests each."""
    turns = decodes(replayed, WAVES.index(WAVES[3]))
    assert {turn.num_requests for turn in turns} >= {5, 1}
    for turn in [*decodes(replayed, 0), *turns]:
        assert turn.calls.get("graph_replays", 0) == (2 if turn.num_requests <= 4 else 0)


def test_a_page_is_given_while_steps_run(replayed):
    kernels = [turn.kernels for turn in decodes(replayed, 1)]
    given = [step for step, names in enumerate(kernels) if "alloc_extend_kernel" in names]
    assert given[0] == 0
    assert len(given) > 1


def test_a_steady_step_waits_for_its_results_only(replayed, plain):
    check_budget(replayed.steady(), plain.steady())
    assert replayed.steady().calls["graph_replays"] == 2


def test_and_so_does_a_sampled_one(replayed, plain):
    check_budget(replayed.steady(SAMPLED_WAVE), plain.steady(1))


def test_sampled_tokens_are_of_the_nucleus_and_not_all_the_likeliest(replayed, exact):
    outputs = replayed.tokens[len(PROMPTS) :]
    pairs = list(zip(SHORT, outputs, strict=True))
    assert [exact.outside_nucleus(*pair, TEMPERATURE, TOP_P) for pair in pairs] == [[], [], []]
    assert any(exact.greedy(*pair).wrong for pair in pairs)


def test_nano_deepseek_keeps_its_drafts_and_has_transformers_tokens():
    """Here attention is the interpreted kernel."""
    nano = model_path("nano-deepseek")
    prompts = chat_prompts(nano, QUESTIONS)
    waves = [requests(prompts, max_new_tokens=16)]
    report = served_by_mtp(nano, waves, *GRAPH_OF_4, environ=INTERPRETED_MLA)
    assert report.names.items() >= DEEPSEEK.items()
    Oracle(nano).check_greedy(prompts, report.tokens)
    assert tokens_per_step(report) > 1.5
