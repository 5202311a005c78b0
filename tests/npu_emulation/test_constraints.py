"""What this package says that torch_npu asks for is what torch_npu says, and the documented calls,
which Meta kernels accept on each SoC, differ by it from nine that they accept as well.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from npu_calls import GOOD, NINE

from sglang_ascend.ops.npu import CONSTRAINTS, CallRefused, CheckedCalls, difference, documentation
from sglang_ascend.ops.npu.constraint import Constraints

GOOD_CALLS = [(name, kind) for name, kinds in GOOD.items() for kind in kinds]
# torch_npu's own Meta kernel asks for k, which its schema leaves out; storage formats have none.
WITHOUT_META = {
    ("npu_top_k_top_p", "p alone"): (TypeError, "'k'"),
    ("npu_convert_weight_to_int4pack", ""): (NotImplementedError, "no fake impl"),
    ("npu_format_cast", ""): (NotImplementedError, "no fake impl"),
    ("get_npu_format", ""): (NotImplementedError, "no fake impl"),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_the_installed_operator_is_the_one_that_is_described(name):
    constraints, docs = CONSTRAINTS[name], documentation()
    assert difference(constraints, docs) is None
    for rule in constraints.rules:
        assert not rule.line or rule.quote in docs[rule.line - 1]


def test_another_operator_is_noticed():
    constraints, docs = CONSTRAINTS["npu_top_k_top_p"], documentation()
    assert "no operator npu_gone" in difference(Constraints("npu_gone", ()), docs)
    assert "no longer says" in difference(constraints, docs[1:])
    other = Constraints("npu_swiglu", constraints.rules)
    assert "no longer says" in difference(other, docs[:100])
    packet = SimpleNamespace(name="npu_swiglu", schema=constraints.schema, rules=())
    assert "another schema" in difference(packet, docs)


@pytest.mark.parametrize(("name", "kind"), GOOD_CALLS)
def test_a_documented_call_passes_the_meta_kernel(soc, name, kind):
    error, message = WITHOUT_META.get((name, kind), (None, ""))
    with CheckedCalls(), pytest.raises(error, match=message) if error else nullcontext():
        getattr(torch.ops.npu, name)(**GOOD[name][kind])


@pytest.mark.parametrize(("name", "kind", "changes"), NINE)
def test_a_meta_kernel_accepts_what_is_refused_here(soc, name, kind, changes):
    call = GOOD[name][kind] | changes
    getattr(torch.ops.npu, name)(**call)
    with CheckedCalls(), pytest.raises(CallRefused):
        getattr(torch.ops.npu, name)(**call)
