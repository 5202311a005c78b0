"""The parts of verify-npu that need no card pass on the emulated NPU, and find what is wrong there:
a body that computes something else, and a body that waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from npu_emulation.device_work import enqueue
from npu_emulation.goldens.registry import GOLDENS
from sglang_ascend.env import LOG_WAITS
from sglang_ascend.ops.dispatch import OPS, Implementation
from sglang_ascend.plugin.npu.waits import log_waits
from sglang_ascend.verify import machine
from sglang_ascend.verify.checks import Check
from sglang_ascend.verify.operators import against_reference as operators
from sglang_ascend.verify.operators import synchronisation
from sglang_ascend.verify.operators.against_reference import BoundCall, bound_calls

pytestmark = pytest.mark.usefixtures("numerics")
# Those over torch_npu: Triton has no compiler for an emulated device.
CALLS = [call for call in bound_calls("npu") if call.op.choose("npu").name == "npu"]


BODIES = {name for name, op in OPS.items() if "npu" in op._implementations}


def failed(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.note for check in checks if check.passed is False}


def passed(checks: list[Check]) -> set[str]:
    """Operators: a body may leave one of two dtypes to the reference, not both."""
    return {check.name.split(" ")[0] for check in checks if check.passed}


def test_the_report_says_that_the_npu_is_emulated():
    assert machine.describe("npu").label == machine.EMULATED


def test_every_body_passes_as_on_a_card():
    checks = [operators.check_call(call) for call in CALLS]
    assert failed(checks) == {}
    assert passed(checks) == BODIES


def test_no_body_waits_and_a_wait_would_be_seen():
    assert synchronisation.sees_a_wait("npu").passed
    checks = [synchronisation.check_call(call) for call in CALLS]
    assert failed(checks) == {}
    # What prepares a weight is called when it is loaded, where it may wait.
    assert BODIES - passed(checks) == {
        "quantized.prepare_integer",
        "quantized.prepare_weight_only",
    }


@pytest.fixture
def another_body(monkeypatch) -> Callable[[str, Callable[..., Any]], BoundCall]:
    def install(name: str, function: Callable[..., Any]) -> BoundCall:
        body = Implementation("another", function, frozenset({"npu"}))
        monkeypatch.setitem(OPS[name]._bodies, "npu", (body, *OPS[name].bodies("npu")))
        return BoundCall(OPS[name], torch.bfloat16, "npu")

    return install


def test_a_sum_of_other_weights_and_one_of_another_type_are_found(another_body):
    right = OPS["experts.unpermute"].implementation("npu")
    wrong = another_body("experts.unpermute", lambda rows, shares, to: right(rows, 2 * shares, to))
    assert operators.check_call(wrong).passed is False
    wide = another_body("experts.unpermute", lambda *args: right(*args).float())
    assert operators.check_call(wide).passed is False


@pytest.mark.parametrize("check_call", [operators.check_call, synchronisation.check_call])
def test_a_kernel_that_fails_behind_its_call_is_reported_and_the_next_is_checked(
    another_body, check_call
):
    right = OPS["experts.unpermute"].implementation("npu")

    def fails() -> None:
        raise RuntimeError("aicore exception, error code 507015")

    def body(*args: Any) -> torch.Tensor:
        result = right(*args)
        enqueue(fails)
        return result

    found = check_call(another_body("experts.unpermute", body))
    assert found.passed is False and "507015" in found.note
    assert check_call(BoundCall(OPS["layers.swiglu"], torch.bfloat16, "npu")).passed


def test_a_wait_of_a_server_is_a_line_of_its_log(monkeypatch, capfd):
    """verify-npu counts them; the words are torch_npu's own."""
    monkeypatch.setenv(LOG_WAITS.name, "1")
    number = torch.ones((), device="npu")
    try:
        log_waits()
        for _ in range(3):
            number.item()
    finally:
        torch.npu.set_sync_debug_mode("default")
    number.item()
    assert capfd.readouterr().err.count(synchronisation.WAITED) == 3


def fetches(x: torch.Tensor) -> None:
    x.cpu()


def reads_a_number(x: torch.Tensor) -> None:
    x.sum().item()


def makes_a_list(x: torch.Tensor) -> None:
    x[0, :2].tolist()


def brings_a_list(x: torch.Tensor) -> None:
    torch.tensor([1.0, 2.0], device=x.device)


def waits_for_its_stream(x: torch.Tensor) -> None:
    torch.npu.current_stream().synchronize()


@pytest.mark.parametrize(
    "wait", [fetches, reads_a_number, makes_a_list, brings_a_list, waits_for_its_stream]
)
def test_a_body_that_waits_is_found(another_body, wait):
    right = OPS["experts.unpermute"].implementation("npu")

    def waits(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        wait(x)
        return right(x, *rest)

    found = synchronisation.check_call(another_body("experts.unpermute", waits))
    assert found.passed is False and found.note


def multiplied_wrong() -> set[str]:
    """Products whose check does not pass."""
    checks = [operators.check_call(call) for call in CALLS if not call.case.at_load]
    return {name.split(" ")[0].removeprefix("quantized.") for name in failed(checks)}


def test_int4_that_is_packed_in_another_order_is_found(monkeypatch):
    """A product is of the weight that the device's own body has prepared, as a server's is."""
    right = GOLDENS["npu::npu_convert_weight_to_int4pack"]

    def reversed_order(weight: torch.Tensor) -> torch.Tensor:
        return right(weight.unflatten(-1, (-1, 8)).flip(-1).flatten(-2))

    monkeypatch.setitem(GOLDENS, "npu::npu_convert_weight_to_int4pack", reversed_order)
    packed = {"grouped_integer_linear", "grouped_weight_only_linear", "weight_only_linear"}
    assert multiplied_wrong() == packed


def test_tiles_that_are_stored_in_another_order_are_found(monkeypatch):
    def flipped(input: torch.Tensor, acl_format: int) -> torch.Tensor:
        return input.flip(-1)

    monkeypatch.setitem(GOLDENS, "npu::npu_format_cast", flipped)
    assert multiplied_wrong() == {"grouped_integer_linear", "integer_linear"}


def test_a_call_that_the_documentation_excludes_is_not_made(another_body):
    right = OPS["experts.unpermute"].implementation("npu")

    def places_in_int64(rows: torch.Tensor, shares: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return right(rows, shares, to.long())

    check = operators.check_call(another_body("experts.unpermute", places_in_int64))
    assert check.passed is False and check.note.startswith("CallRefused: npu_moe_finalize_routing")
