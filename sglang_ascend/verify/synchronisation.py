"""Whether an operator's body makes the host wait for the device; the budget is nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_ascend.verify.checks import Check, Progress, sentence_of
from sglang_ascend.verify.operators import BoundCall, bound_calls

# Operations whose result or shape is data: on a device the host waits for them.
READS = {"_local_scalar_dense", "nonzero", "unique", "_unique2", "masked_select", "equal"}
# torch's and torch_npu's words where their debug mode stops a call.
WAITED = "called a synchronizing"


class HostReads(TorchDispatchMode):
    """Collects what would be waits on a device, where there is no device that could tell."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def wait_of(device: str, run: Callable[[], Any]) -> str:
    """What the host waited for in a second ``run``, empty for nothing; the first one compiles.

    The device's debug mode stops at the first wait. torch_npu's says of itself that it may miss
    some, and its milder mode only writes to standard error.
    """
    device_module = torch.get_device_module(device)
    run()
    device_module.synchronize()
    if device == "cpu":
        with HostReads() as reads:
            run()
        return ", ".join(sorted(reads.names))
    device_module.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if WAITED not in str(error):
            raise
        return sentence_of(error)
    finally:
        device_module.set_sync_debug_mode("default")
    return ""


def sees_a_wait(device: str) -> Check:
    """The control: reading a number must be seen, or seeing nothing means nothing."""
    number = torch.ones((), device=device)
    found = wait_of(device, lambda: (number + 1).item())
    return Check("control: reading one number waits", bool(found), note=found or "not seen")


def check_call(call: BoundCall) -> Check:
    reason = call.declined()
    if reason:
        return Check(call.name, None, note=reason)
    args, kwargs = call.prepare(call.device)
    try:
        found = wait_of(call.device, lambda: call.body(*args, **kwargs))
    except Exception as error:
        return Check(call.name, False, note=sentence_of(error))
    if call.device == "cpu":
        return Check(call.name, None, note=f"there is no device to wait for; read: {found or '-'}")
    return Check(call.name, not found, note=found)


def check_synchronisation(device: str, progress: Progress) -> list[Check]:
    calls = list(bound_calls(device))
    progress("control", len(calls) + 1)
    checks = [sees_a_wait(device)]
    for call in calls:
        progress(call.name, len(calls) + 1)
        checks.append(check_call(call))
    return checks
