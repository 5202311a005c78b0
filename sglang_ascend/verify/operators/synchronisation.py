"""Whether an operator's body makes the host wait for the device; the budget is nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_ascend.verify.checks import Check, Progress, found_by, sentence_of
from sglang_ascend.verify.operators.against_reference import BoundCall, bound_calls

# Operations whose result or shape is data: on a device the host waits for them.
READS = {"_local_scalar_dense", "nonzero", "unique", "_unique2", "masked_select", "equal"}
# Copies, between host and device; a kernel's body has no business with the host.
COPIES = {"copy_", "_to_copy"}
# What torch.tensor ends in, behind a copy that is not dispatched.
NEW_FROM_HOST = "lift_fresh"
# torch's and torch_npu's words where their debug mode stops a call.
WAITED = "called a synchronizing"
CONTROL = "control: waits are seen"


class HostReads(TorchDispatchMode):
    """Collects the operations that make a host wait, by what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        devices = devices_of((args, result))
        brings = name == NEW_FROM_HOST and devices != {"cpu"}
        if name in READS or brings or (name in COPIES and len(devices) > 1):
            self.names.add(name)
        return result


def devices_of(value: Any) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}


def wait_of(device: str, run: Callable[[], Any]) -> str:
    """What the host waits for in ``run``, empty for nothing; it runs once before, to compile.

    Seen twice over: by the operations that are dispatched, and by the device's debug mode, which
    stops at the first wait. That of torch_npu 2.13 sees waits for a stream, but no blocking copy.
    """
    device_module = torch.get_device_module(device)
    run()
    device_module.synchronize()
    with HostReads() as reads:
        run()
    if reads.names or device == "cpu":
        return ", ".join(sorted(reads.names))
    device_module.synchronize()
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
    """The control: a wait must be seen, or seeing nothing means nothing. Never raises."""
    return found_by(CONTROL, lambda: _control(device))


def _control(device: str) -> Check:
    number, stream = torch.ones((), device=device), torch.get_device_module(device).current_stream()
    waits: dict[str, Callable[[], Any]] = {"a number is read": lambda: (number + 1).item()}
    if device != "cpu":
        waits["a tensor is fetched"] = (number + 1).cpu
        waits["a stream is waited for"] = stream.synchronize
    unseen = [name for name, run in waits.items() if not wait_of(device, run)]
    return Check(CONTROL, not unseen, note=", ".join(unseen))


def check_call(call: BoundCall) -> Check:
    """Never raises."""
    return found_by(call.name, lambda: _watched(call))


def _watched(call: BoundCall) -> Check:
    reason = call.declined()
    if reason:
        return Check(call.name, None, note=reason)
    if call.case.at_load:
        return Check(call.name, None, note="called when weights are loaded, where it may wait")
    args, kwargs = call.prepare(call.device)
    found = wait_of(call.device, lambda: call.body(*args, **kwargs))
    if call.device == "cpu":
        return Check(call.name, None, note=f"there is no device to wait for; read: {found or '-'}")
    return Check(call.name, not found, note=found)


def check_synchronisation(device: str, progress: Progress) -> list[Check]:
    calls = bound_calls(device)
    progress("control", len(calls) + 1)
    checks = [sees_a_wait(device)]
    for call in calls:
        progress(call.name, len(calls) + 1)
        checks.append(check_call(call))
    return checks
