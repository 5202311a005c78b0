"""SGLang's own NPU path, whole, on the emulated NPU: its classes serve, with transformers' tokens.

Where SGLang cannot import a model it serves another implementation of it in silence, so the classes
that served are compared by name. Tokens are judged by greedy_oracle.py, which says when a token
that is not transformers' is right. Label of all this: "host path on emulated NPU".
"""

from __future__ import annotations

import pytest
from greedy_oracle import Oracle

from npu_emulation.report import Report
from npu_emulation.sglang_runs import EAGER, FUSED_ATTENTION, NEXTN, prompt, requests, served

PAGE = 128
SHORT = [prompt(length, seed) for seed, length in enumerate((9, 14, 19))]
# A page and less, two pages by three chunks, one that fills its page while it decodes.
LONG = [prompt(length, seed) for seed, length in enumerate((200, 300, 125), start=3)]
EXTENDED = [[*LONG[1], 77, 78, 79]]  # shares two full pages with a prompt that was served
GREEDY_WAVES = [requests(SHORT), requests(LONG), requests(EXTENDED)]
SPECULATED_WAVES = [requests(SHORT, max_new_tokens=24), *GREEDY_WAVES[1:]]
PROMPTS = [*SHORT, *LONG, *EXTENDED]
TEMPERATURE, TOP_P = 0.8, 0.9
SAMPLED = requests(SHORT, temperature=TEMPERATURE, top_p=TOP_P, max_new_tokens=24)

DEEPSEEK = {
    "platform": "NPUSRTPlatform",
    "model": "DeepseekV3ForCausalLM",
    "attention": "AscendAttnBackend",
    "pool": "NPUMLATokenToKVPool",
    "allocator": "NPUPagedTokenToKVPoolAllocator",
}
OVERLAPPED = {"scheduler_loop": "overlap", "graph_runner": "NPUGraphRunner"}


@pytest.fixture(scope="session")
def plain(deepseek) -> Report:
    return served(deepseek, [*GREEDY_WAVES, SAMPLED], environ=FUSED_ATTENTION)


@pytest.fixture(scope="session")
def eager(deepseek) -> Report:
    return served(deepseek, GREEDY_WAVES, EAGER)


@pytest.fixture(scope="session")
def nextn(guessable) -> Report:
    return served(guessable, SPECULATED_WAVES, NEXTN, environ=FUSED_ATTENTION)


def test_the_npu_s_classes_serve_a_deepseek_by_graphs_and_overlapped(plain):
    assert plain.names == DEEPSEEK | OVERLAPPED


@pytest.mark.slow
def test_and_without_graphs_and_overlap(eager):
    assert eager.names == DEEPSEEK | {"scheduler_loop": "normal", "graph_runner": "none"}


def test_greedy_tokens_are_transformers_on_pages_chunks_and_cached_prefixes(plain, oracle):
    oracle.check_greedy(PROMPTS, plain.tokens[: len(PROMPTS)])


@pytest.mark.slow
def test_without_graphs_and_with_atb_s_attention_too(eager, oracle):
    oracle.check_greedy(PROMPTS, eager.tokens)


def test_speculated_greedy_tokens_are_transformers_with_drafts_kept_and_not(nextn, guessable):
    Oracle(guessable).check_greedy(PROMPTS, nextn.tokens)
    for wave, num_prompts in enumerate((3, 3, 1)):
        outputs = nextn.tokens[3 * wave :][:num_prompts]
        num_drawn = sum(len(output) - 1 for output in outputs)
        turns = [turn for turn in nextn.iterations if turn.wave == wave]
        num_verified = sum(turn.num_requests for turn in turns if turn.forward == "DECODE")
        assert num_drawn / 3 < num_verified < num_drawn, "between every draft and none"


@pytest.mark.parametrize("run", ["plain", pytest.param("eager", marks=pytest.mark.slow), "nextn"])
def test_long_prompts_were_cut_and_shared_pages_were_found(run, request):
    report = request.getfixturevalue(run)
    assert report.cached_tokens[: len(PROMPTS)] == [0] * (len(PROMPTS) - 1) + [2 * PAGE]
    prefills = [turn for turn in report.iterations if turn.forward == "EXTEND"]
    assert [sum(turn.wave == wave for turn in prefills) for wave in range(3)] == [1, 2, 1]


def test_sampled_tokens_are_of_the_nucleus_and_not_all_the_likeliest(plain, oracle):
    outputs = plain.tokens[len(PROMPTS) :]
    pairs = list(zip(SHORT, outputs, strict=True))
    assert [oracle.outside_nucleus(*pair, TEMPERATURE, TOP_P) for pair in pairs] == [[], [], []]
    assert any(oracle.greedy(*pair).wrong for pair in pairs)


def test_a_steady_step_of_plain_decode_waits_for_its_results_only(plain):
    step = plain.steady()
    assert step.num_alike == step.num_iterations
    assert step.num_kernels == 0
    assert step.calls == {"launches": 37, "graph_replays": 1, "async_d2h": 1, "event_syncs": 2}


def test_a_steady_step_of_nextn_waits_three_times_for_streams_and_four_for_events(nextn):
    """Two of the stream's waits are for copies from unpinned memory, one for a blocking copy; three
    of the events' are fences of graphs that are bound to new lengths."""
    step = nextn.steady()
    assert step.num_alike == step.num_iterations
    assert step.num_kernels == 6
    assert step.calls == {
        "launches": 78,
        "graph_replays": 3,
        "async_h2d": 4,
        "d2h": 1,
        "async_d2h": 2,
        "stream_syncs": 3,
        "event_syncs": 4,
    }


def test_nextn_s_classes_draft_and_verify_on_the_npu(nextn):
    drafted = {
        "speculative_worker": "EAGLEWorkerV2",
        "draft_model": "DeepseekV3ForCausalLMNextN",
        "draft_attention": "AscendAttnBackend",
        "draft_pool": "NPUMLATokenToKVPool",
        "draft_allocator": "NPUPagedTokenToKVPoolAllocator",
    }
    assert nextn.names.items() >= (DEEPSEEK | OVERLAPPED | drafted).items()
