"""Dispatch: one implementation per operator and device, chosen once; doubt is an error."""

import pytest
import torch

from sglang_ascend.ops import attention, chain, linear, sampling, slots
from sglang_ascend.ops.dispatch import OPS, REFERENCE, Implementation, Op

ON_CUDA = {
    "attention.paged_gqa": "triton",
    "attention.paged_mla": "triton",
    "chain.place_tail": "triton",
    "chain.prepare_step": "triton",
    "chain.verify_chain": "triton",
    "sampling.draw_kept": "triton",
    "sampling.filter_probs": "triton",
    "sampling.top_k_top_p": "triton",
}
# A draw's tile reads past the last row there: the reference draws.
ON_NPU = {name: body for name, body in ON_CUDA.items() if name != "sampling.draw_kept"}
ON_CPU = {
    "attention.paged_gqa": "numba",
    "chain.place_tail": "numba",
    "chain.prepare_step": "numba",
    "chain.verify_chain": "numba",
    "linear.prepare": "onednn",
    "linear.linear": "onednn",
    "sampling.draw_kept": "numba",
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


def test_an_implementation_for_any_device_clashes_with_one_for_some(op):
    op.register(implementation("anywhere"))
    assert op.choose("cpu").name == "anywhere"
    op.register(implementation("here", {"cpu"}))
    with pytest.raises(RuntimeError, match="ambiguous"):
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
    for module in (attention, chain, linear, sampling, slots):
        group = module.__name__.rsplit(".", 1)[1]
        defined = {
            f"{group}.{name}": value
            for name, value in vars(module).items()
            if isinstance(value, Op)
        }
        assert defined
        for name, operator in defined.items():
            assert OPS[name] is operator
            assert operator.choose("cpu").name == ON_CPU.get(name, REFERENCE)
            assert operator.choose("cuda").name == ON_CUDA.get(name, REFERENCE)
            assert operator.choose("npu").name == ON_NPU.get(name, REFERENCE)
