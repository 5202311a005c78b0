"""Of a call to torch_npu everything is checked that its documentation asks for, before it is made.

That Meta kernels accept the nine calls of NINE, and that the documentation says what a constraint
quotes, is tested where torch_npu is installed (tests/npu_emulation).
"""

from __future__ import annotations

import pytest
import torch
from npu_calls import FIRST, GOOD, NINE, WRONG, empty

from sglang_ascend.ops.npu import CONSTRAINTS, CallRefused, CheckedCalls, refusal
from sglang_ascend.ops.npu.latents import untaken_latents

GOOD_CALLS = [(name, kind) for name, kinds in GOOD.items() for kind in kinds]
WRONG_CALLS = [
    (name, kind, says, changes)
    for name, kinds in WRONG.items()
    for kind, broken in kinds.items()
    for says, changes in broken
]


@pytest.mark.parametrize(("name", "kind"), GOOD_CALLS)
def test_a_documented_call_is_not_refused(name, kind):
    assert refusal(name, (), GOOD[name][kind]) is None


@pytest.mark.parametrize(("name", "kind", "says", "changes"), WRONG_CALLS)
def test_a_change_that_breaks_a_rule_is_refused_by_that_rule(name, kind, says, changes):
    good = GOOD[name][kind]
    known = {
        parameter.name for parameter in torch._C.parse_schema(CONSTRAINTS[name].schema).arguments
    }
    found = refusal(name, (), good | {key: changes[key] for key in changes.keys() & known})
    assert found is not None and says in found
    assert found.startswith(f"{name}: ")


def test_every_rule_is_broken_by_some_change():
    broken = {
        (name, rule.says)
        for name, _, says, _ in WRONG_CALLS
        for rule in CONSTRAINTS[name].rules
        if says in rule.says
    }
    assert broken == {(name, rule.says) for name in CONSTRAINTS for rule in CONSTRAINTS[name].rules}


@pytest.mark.parametrize(("name", "kind", "changes"), NINE)
def test_what_meta_kernels_accept_is_refused(name, kind, changes):
    assert refusal(name, (), GOOD[name][kind] | changes) is not None


def test_latents_are_said_to_be_untaken_where_their_rotation_is_refused():
    """nano-deepseek's and DeepSeek-V3's; a model without latents says nothing."""
    for latent, rotated in ((88, 32), (512, 64)):
        sizes = {"kv_lora_rank": latent, "qk_rope_head_dim": rotated}
        angles = empty(4, 1, 1, rotated)
        call = {"x": empty(4, 6, 1, rotated), "cos": angles, "sin": angles}
        assert bool(untaken_latents(sizes)) == (
            refusal("npu_interleave_rope", (), call) is not None
        )
    assert untaken_latents({"hidden_size": 576}) == ""


def test_arguments_are_bound_as_the_schema_has_them():
    x, gamma = empty(4, 96), empty(96)
    assert refusal("npu_rms_norm", (x, gamma, 1e-6), {}) is None
    assert "takes 3 positional" in refusal("npu_rms_norm", (x, gamma, 1e-6, 0), {})
    assert "'gamma'" in refusal("npu_rms_norm", (x,), {})
    assert "'weight'" in refusal("npu_rms_norm", (x, gamma), {"weight": gamma})
    assert "'gamma'" in refusal("npu_rms_norm", (x, gamma), {"gamma": gamma})


class TestTheMode:
    @pytest.fixture
    def made(self):
        """Operators of torch_npu's names and schemas, and the calls that reached them."""
        calls = []
        with torch.library._scoped_library("npu", "FRAGMENT") as library:
            for name in ("npu_swiglu", FIRST):
                library.define(CONSTRAINTS[name].schema.removeprefix("npu::"))
                library.impl(name, lambda *args, **kwargs: calls.append(args) or args[0], "Meta")
            library.define("npu_other(Tensor x) -> Tensor")
            library.impl("npu_other", lambda x: x, "Meta")
            yield calls

    def test_a_good_call_is_made_and_a_wrong_one_is_not(self, made):
        with CheckedCalls():
            torch.ops.npu.npu_swiglu(empty(4, 96))
            torch.ops.npu.npu_swiglu.default(empty(4, 96), -1)
            for operator in (torch.ops.npu.npu_swiglu, torch.ops.npu.npu_swiglu.default):
                with pytest.raises(CallRefused, match="two equal halves"):
                    operator(empty(4, 95))
        assert len(made) == 2
        torch.ops.npu.npu_swiglu(empty(4, 95))
        assert len(made) == 3

    def test_a_tensor_in_the_place_of_host_lengths_is_seen(self, made):
        call = GOOD[FIRST]["decode"] | {"actual_seq_lengths_kv": torch.tensor([129, 300])}
        with CheckedCalls(), pytest.raises(CallRefused, match="host integers"):
            torch.ops.npu.npu_fused_infer_attention_score(**call)
        assert not made

    def test_an_operator_without_constraints_is_named(self, made):
        with CheckedCalls() as checked:
            torch.ops.npu.npu_other(empty(1))
            torch.ops.aten.relu(empty(1))
        assert checked.unknown == {"npu_other"}
