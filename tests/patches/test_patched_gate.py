"""On an NPU the gate of experts is asked to normalize weights of softmax alone, by a patch and by
what stands in for it.

CANN's own kernel divides those of sigmoid in any case (moe_gating_top_k_generalized.h), and its
tiling of 8.5 refuses a call that asks for it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.sglang

CASES = [  # scoring, grouped, biased -> whether SGLang's own call may go on asking
    ("sigmoid", True, True, False),
    ("sigmoid", False, True, False),
    ("sigmoid", True, False, False),
    ("softmax", True, True, True),
]


def gate(scoring: str, is_grouped: bool, is_biased: bool) -> Any:
    from sglang.srt.layers.moe.topk import TopK, TopKConfig

    layer = TopK.__new__(TopK)  # else it asks what is served
    torch.nn.Module.__init__(layer)
    layer.topk_config = TopKConfig(
        top_k=2,
        use_grouped_topk=is_grouped,
        topk_group=1,
        num_expert_group=2,
        renormalize=True,
        correction_bias=torch.zeros(8) if is_biased else None,
        scoring_func=scoring,
    )
    return layer


@pytest.fixture
def asked(monkeypatch) -> list[dict[str, Any]]:
    """The arguments of each call of CANN's gate."""
    calls: list[dict[str, Any]] = []

    def called(scores: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, ...]:
        calls.append(arguments)
        return scores[:, :2], torch.zeros(len(scores), 2, dtype=torch.int32), scores

    monkeypatch.setattr(torch.ops, "npu", SimpleNamespace(npu_moe_gating_top_k=called))
    return calls


@pytest.mark.parametrize(("scoring", "is_grouped", "is_biased", "asks"), CASES)
def test_0035_and_ours_ask_for_the_norm_of_softmax_alone(
    patched, asked, monkeypatch, scoring, is_grouped, is_biased, asks
):
    from sglang.srt.hardware_backend.npu.moe import topk

    from sglang_ascend.plugin.npu.models import leave_norm_to_the_gate

    layer = gate(scoring, is_grouped, is_biased)
    rows = torch.randn(3, 16), torch.randn(3, 8)
    monkeypatch.setattr(topk, "_finalize_topk_npu", lambda **results: None)
    theirs = patched("0035", "fused_topk_npu", **vars(topk))
    for function in (topk.fused_topk_npu, theirs):
        function(*rows, layer.topk_config)
    leave_norm_to_the_gate(torch.nn.Sequential(layer))
    topk.fused_topk_npu(*rows, layer.topk_config)
    assert [bool(arguments.pop("renorm")) for arguments in asked] == [True, asks, asks]
    (before, *after) = ({k: str(v) for k, v in arguments.items()} for arguments in asked)
    assert after == [before, before]


def test_a_gate_that_another_operator_serves_is_left_alone():
    """Without groups and bias SGLang calls the gate of softmax, and divides itself."""
    from sglang_ascend.plugin.npu.models import leave_norm_to_the_gate

    layer = gate("sigmoid", False, False)
    leave_norm_to_the_gate(torch.nn.Sequential(layer))
    assert layer.topk_config.renormalize
