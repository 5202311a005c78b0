"""Every body for the NPU computes what its reference does, by calls that the documentation allows.

The operators of torch_npu are computed by goldens/, which were written from its documentation and
not from this package's references.
"""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from npu_emulation.body_calls import BODIES, CALLS, on_device, to
from sglang_ascend.ops.dispatch import OPS
from sglang_ascend.ops.npu import CallRefused, CheckedCalls


def test_every_body_has_a_call():
    assert sorted(CALLS) == BODIES


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("name", BODIES)
def test_a_body_computes_what_its_reference_computes(name):
    args, kwargs = CALLS[name]()
    on_npu = on_device(args)
    with CheckedCalls():
        found = OPS[name].implementation("npu")(*on_npu, **kwargs)
    expected = OPS[name].implementation("reference")(*args, **kwargs)
    # What was written in place counts as well; two roundings to bf16 may differ by one.
    assert_close(to("cpu", (found, on_npu)), (expected, args), rtol=2**-7, atol=2**-7)


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("name", BODIES)
def test_another_call_does_not_pass_for_it(name):
    (args, kwargs), (others, _) = CALLS[name](), CALLS[name]()
    on_npu = on_device(others)
    found = OPS[name].implementation("npu")(*on_npu, **kwargs)
    expected = OPS[name].implementation("reference")(*args, **kwargs)
    with pytest.raises(AssertionError):
        assert_close(to("cpu", (found, on_npu)), (expected, args), rtol=2**-7, atol=2**-7)


def test_a_body_that_breaks_a_rule_is_stopped():
    with CheckedCalls(), pytest.raises(CallRefused, match="gamma has the width"):
        OPS["norm.rms_norm"].implementation("npu")(
            torch.zeros(2, 96, device="npu"), torch.zeros(64, device="npu"), 1e-6
        )
