"""What torch_npu asked of the runtime: launches, copies, synchronisations, allocations."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

from npu_emulation.environment import build_folder

runtime = ctypes.CDLL(str(build_folder() / "libascendcl.so"))
runtime.npu_emulation_counter_names.restype = ctypes.c_char_p
runtime.npu_emulation_launch_name.restype = ctypes.c_char_p
runtime.npu_emulation_launch_name.argtypes = [ctypes.c_long]
runtime.npu_emulation_stub_name.restype = ctypes.c_char_p
runtime.npu_emulation_stub_calls.restype = ctypes.c_long
runtime.npu_emulation_num_pending.restype = ctypes.c_long
runtime.npu_emulation_late_copies.argtypes = [ctypes.c_bool]
runtime.npu_emulation_run_ahead.argtypes = [ctypes.c_void_p]

NAMES = runtime.npu_emulation_counter_names().decode().split()

# Settings, destructors and profiling: that they do nothing changes no count and no value.
_HARMLESS = set(
    """aclDestroyAclOpExecutor aclDestroyBoolArray aclDestroyFloatArray aclDestroyIntArray
    aclDestroyScalar aclDestroyTensorList aclFinalize aclGetCannAttribute aclInit
    aclmdlRICaptureThreadExchangeMode aclmdlRIGetId aclrtCtxSetSysParamOpt aclrtGetSysParamOpt
    aclrtPeekAtLastError aclrtSetCurrentContext aclrtSetDeviceSatMode aclrtSetOpExecuteTimeOutV2
    aclrtSetOpWaitTimeout aclrtSetStreamAttribute aclrtSetStreamFailureMode
    aclrtSetStreamOverflowSwitch aclrtSetSysParamOpt HcclGetCommConfigCapability
    HcclSetConfig""".split()
)
_ATB = "_ZN3atb"  # its operators cannot be created here, which torch_npu reports as an error


@dataclass
class Counts:
    """Number of calls of each kind that was made; `launched` names every launch, in order."""

    calls: dict[str, int] = field(default_factory=dict)
    launched: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> int:
        if name not in NAMES:
            raise AttributeError(name)
        return self.calls.get(name, 0)

    @property
    def without_mallocs(self) -> dict[str, int]:
        """The calls, less those to the device's allocator, which a warm step does not make."""
        return {name: number for name, number in self.calls.items() if name != "mallocs"}


def totals() -> dict[str, int]:
    values = (ctypes.c_long * len(NAMES))()
    runtime.npu_emulation_counters(values)
    return dict(zip(NAMES, values, strict=True))


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """The counts of the block, filled in at its end."""
    before, counts = totals(), Counts()
    try:
        yield counts
    finally:
        after = totals()
        counts.calls |= {
            name: after[name] - before[name] for name in NAMES if after[name] != before[name]
        }
        numbers = range(before["launches"], after["launches"])
        names = (runtime.npu_emulation_launch_name(number) for number in numbers)
        counts.launched += [name.decode() for name in names]


def num_pending() -> int:
    """Pieces of work that are queued on some stream and have not been executed."""
    return runtime.npu_emulation_num_pending()


@contextlib.contextmanager
def late_copies() -> Iterator[None]:
    """Copies to the device that the block queues asynchronously land when the host waits for them,
    and not before: kernels that are queued behind them run first."""
    runtime.npu_emulation_late_copies(True)
    try:
        yield
    finally:
        runtime.npu_emulation_late_copies(False)


def stubs_called() -> dict[str, int]:
    """CANN functions that this process called and that do nothing but succeed."""
    found, number = {}, 0
    while name := runtime.npu_emulation_stub_name(number):
        if calls := runtime.npu_emulation_stub_calls(number):
            found[name.decode()] = calls
        number += 1
    return found


def left_undone() -> list[str]:
    """Those of them that a device would have done something in."""
    called = (name for name in stubs_called() if not name.startswith(_ATB))
    return sorted(set(called) - _HARMLESS)
