"""Dispatch: one implementation per operator and device, chosen once; doubt is an error."""

import pytest
import torch

from sglang_ascend.ops import attention, chain, experts, layers, linear, quantized, sampling, slots
from sglang_ascend.ops.dispatch import OPS, REFERENCE, Implementation, Op

WITH_TRITON = {
    "attention.paged_gqa": "triton",
    "attention.paged_mla": "triton",
    "chain.place_draft_decode": "triton",
    "chain.prepare_step": "triton",
    "chain.verify_chain": "triton",
    "sampling.filter_probs": "triton",
    "sampling.top_k_top_p": "triton",
}
# On any device, beside or behind those for one.
BY_TORCH = {
    f"attention.{name}"
    for name in ("paged_gqa", "paged_gqa_ragged", "paged_mla", "paged_mla_ragged")
}
ON_CPU = {
    **dict.fromkeys(BY_TORCH, "numba"),
    "chain.extend_context": "numba",
    "chain.look_up": "numba",
    "chain.place_draft_decode": "numba",
    "chain.prepare_step": "numba",
    "chain.verify_chain": "numba",
    "drafts.latent_layer": "numba",
    "drafts.prepare_latent": "numba",
    "experts.gating": "numba",
    "experts.grouped_matmul": "numba",
    "experts.permute": "numba",
    "experts.unpermute": "numba",
    "layers.add_rms_norm": "numba",
    "layers.rms_norm": "numba",
    "layers.rotate_interleaved": "numba",
    "layers.rotate_neox": "numba",
    "layers.swiglu": "numba",
    "linear.by_head": "numba",
    "linear.prepare": "numba",
    "linear.linear": "numba",
    "quantized.block_fp8_linear": "numba",
    "quantized.grouped_block_fp8_linear": "numba",
    "quantized.grouped_integer_linear": "numba",
    "quantized.grouped_weight_only_linear": "numba",
    "quantized.integer_linear": "numba",
    "quantized.prepare_integer": "numba",
    "quantized.weight_only_linear": "numba",
    "sampling.filter_probs": "numba",
    "sampling.greedy": "numpy",
    "sampling.top_k_top_p": "numba",
    "slots.assign_slots": "numba",
}


@pytest.fixture
def op():
    """An operator of this test only."""
    operator = Op("test.op", lambda tensor, add=0: ("reference", add))
    yield operator
    del OPS["test.op"]


def implementation(name, devices=(), available=lambda: True):
    return Implementation(name, lambda tensor, add=0: (name, add), frozenset(devices), available)


def test_the_reference_serves_every_device_that_nothing_else_serves(op):
    op.register(implementation("npu", {"npu"}))
    assert op.choose("cpu").name == REFERENCE
    assert op.choose("cuda").name == REFERENCE
    assert op.choose("npu").name == "npu"


def test_a_call_runs_where_its_first_tensor_lies(op):
    op.register(implementation("fast", {"cpu"}))
    op.register(implementation("shapes-only", {"meta"}))
    assert op(torch.empty(1), add=2) == ("fast", 2)
    assert op(torch.empty(1, device="meta"), 3) == ("shapes-only", 3)


def test_two_implementations_for_one_device_are_an_error_that_names_both(op):
    op.register(implementation("first", {"npu", "cpu"}))
    op.register(implementation("second", {"npu"}))
    assert op.choose("cpu").name == "first"
    with pytest.raises(RuntimeError, match=r"test\.op on npu is ambiguous between first, second"):
        op.choose("npu")


def test_one_for_any_device_serves_what_the_one_for_this_device_declines(op):
    here = implementation("here", {"cpu"})
    op.register(Implementation("here", here.function, here.devices, accepts=lambda *x: len(x) < 2))
    op.register(implementation("anywhere"))
    assert op.choose("cpu").name == "here" and op.choose("npu").name == "anywhere"
    assert op(torch.empty(1)) == ("here", 0)
    assert op(torch.empty(1), 5) == ("anywhere", 5)
    op.register(implementation("everywhere"))
    with pytest.raises(RuntimeError, match="ambiguous between anywhere, everywhere"):
        op.choose("cpu")


def test_what_is_not_available_is_not_chosen(op):
    op.register(implementation("absent", {"cpu"}, available=lambda: False))
    op.register(implementation("present", {"cpu"}))
    assert op.choose("cpu").name == "present"


def test_the_reference_serves_the_calls_that_the_chosen_one_declines(op):
    def accepts(tensor, add=0):
        return tensor.dtype == torch.float32 and add < 5

    fast = implementation("fast", {"cpu"})
    op.register(Implementation("fast", fast.function, fast.devices, accepts=accepts))
    assert op(torch.empty(1), add=4) == ("fast", 4)
    assert op(torch.empty(1), add=5) == (REFERENCE, 5)
    assert op(torch.empty(1, dtype=torch.bfloat16)) == (REFERENCE, 0)


def test_a_choice_is_made_once_per_device(op):
    asked = []
    op.register(implementation("fast", {"cpu", "npu"}, lambda: asked.append(1) or True))
    for _ in range(3):
        op(torch.empty(1))
    assert len(asked) == 1
    op.choose("npu")
    assert len(asked) == 2


def test_a_later_registration_is_taken_into_account(op):
    assert op.choose("cpu").name == REFERENCE
    op.register(implementation("late", {"cpu"}))
    assert op.choose("cpu").name == "late"


def test_an_implementation_is_registered_once(op):
    op.register(implementation("fast"))
    with pytest.raises(ValueError, match=r"test\.op already has an implementation 'fast'"):
        op.register(implementation("fast", {"npu"}))
    with pytest.raises(ValueError, match="already has an implementation 'reference'"):
        op.register(implementation(REFERENCE))


def test_an_operator_is_defined_once(op):
    with pytest.raises(ValueError, match=r"operator 'test\.op' is defined twice"):
        Op("test.op", lambda tensor: None)
    assert OPS["test.op"] is op


def test_an_unknown_implementation_is_an_error(op):
    with pytest.raises(KeyError, match="missing"):
        op.implementation("missing")


def test_a_test_may_name_an_implementation(op):
    op.register(implementation("never-here", {"npu"}))
    assert op.implementation("never-here")(None) == ("never-here", 0)


def test_every_operator_is_listed_under_its_own_name():
    for module in (attention, chain, experts, layers, linear, quantized, sampling, slots):
        group = module.__name__.rsplit(".", 1)[1]
        defined = {
            f"{group}.{name}": value
            for name, value in vars(module).items()
            if isinstance(value, Op)
        }
        assert defined
        for name, operator in defined.items():
            assert OPS[name] is operator
            other = "torch" if name in BY_TORCH else REFERENCE
            assert operator.choose("cpu").name == ON_CPU.get(name, other)
            assert operator.choose("cuda").name == WITH_TRITON.get(name, other)
            assert operator.choose("npu").name == WITH_TRITON.get(name, other)
