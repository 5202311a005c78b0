"""What MTP's server calls of torch_npu its documentation takes: prefills, captures and steps.

Models of documented sizes are served with every call checked before it is made, where constraints
are known (`serving.calls_are_checked`): a DeepSeek in all tests that serve it, a MiMo here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from greedy_oracle import Oracle

from npu_emulation import random_mimo
from npu_emulation.mtp_runs import MTP, SHORT_CONTEXT, served_by_mtp
from npu_emulation.sglang_runs import FUSED_ATTENTION, prompt, requests, start

GRAPH_OF_2 = ("--cuda-graph-bs-decode", "2")
# Over a page of 128 tokens, less, and one that shares the first one's page.
LONG, SHORT = (prompt(length, length, random_mimo.VOCABULARY) for length in (140, 9))
EXTENDED = [*LONG, 77, 78]


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mimo")
    random_mimo.build(folder)
    return folder


def test_heads_of_128_columns_are_served_by_documented_calls(mimo):
    waves = [requests([LONG, SHORT], max_new_tokens=8), requests([EXTENDED], max_new_tokens=4)]
    report = served_by_mtp(mimo, waves, *GRAPH_OF_2)
    assert report.names["model"] == "MiMoForCausalLM"
    assert report.names["pool"] == "NPUMHATokenToKVPool"
    assert report.unchecked == []
    assert report.cached_tokens == [0, 0, 128]
    Oracle(mimo).check_greedy([LONG, SHORT, EXTENDED], report.tokens)


@pytest.mark.parametrize("mistake", ["gate_that_normalizes_twice"])
def test_a_call_that_is_not_taken_stops_the_server(deepseek, mistake):
    """Meta kernels accept it, and so does the emulated device."""
    program = ("npu_emulation.mutated_mtp", mistake)
    waves, flags = [requests([SHORT], max_new_tokens=2)], (*MTP, *SHORT_CONTEXT, *GRAPH_OF_2)
    process, report = start(deepseek, waves, flags, FUSED_ATTENTION, program)
    assert report is None
    assert "CallRefused: npu_moe_gating_top_k: renorm is 0" in process.stderr
