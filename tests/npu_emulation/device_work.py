"""Closures as work of an emulated stream, and `npu` tensors as CPU tensors over the same memory."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

from npu_emulation.counters import num_pending, runtime

POISON = 0xEE  # acl/emulation.h

_FORGET, _ONCE = 2, 0  # call_action of acl/emulation.h
_RUNNER = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int)

runtime.npu_emulation_call.argtypes = [ctypes.c_void_p, ctypes.c_int64]
runtime.npu_emulation_call.restype = None
runtime.npu_emulation_finish.argtypes = [ctypes.c_void_p]
runtime.npu_emulation_finish.restype = None
runtime.npu_emulation_skip_copies.argtypes = [ctypes.c_bool]
runtime.npu_emulation_is_capturing.argtypes = [ctypes.c_void_p]
runtime.npu_emulation_is_capturing.restype = ctypes.c_bool

_closures: dict[int, Callable[[], None]] = {}
_numbers = itertools.count()
_failures: list[BaseException] = []
_this_thread = threading.local()  # whether it executes device work
_seconds: Counter[int] = Counter()  # by thread


def _run(number: int, action: int) -> None:
    closure = _closures.pop(number) if action in (_FORGET, _ONCE) else _closures[number]
    if action != _FORGET:
        run_as_device(closure)


def run_as_device(closure: Callable[[], None]) -> None:
    """Call the closure as work of the device; `raise_failures` has its error."""
    outer, _this_thread.running = is_running(), True
    started = time.perf_counter()
    try:
        # A closure is the device's work: no mode of the thread that happens to wait for it applies.
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
            closure()
    except BaseException as error:  # ctypes would print it and go on
        _failures.append(error)
    finally:
        _this_thread.running = outer
        if not outer:
            _seconds[threading.get_ident()] += time.perf_counter() - started


def seconds_of_work() -> float:
    """What this thread has spent on being the device, since the program began."""
    return _seconds[threading.get_ident()]


_runner = _RUNNER(_run)
runtime.npu_emulation_set_runner(_runner)


def raise_failures() -> None:
    """Raise the error of device work that was executed since the last call, if there was one."""
    if _failures:
        error = _failures[0]
        _failures.clear()
        raise error


def _stream() -> int:
    return torch.npu.current_stream().npu_stream


def enqueue(closure: Callable[[], None]) -> None:
    """Queue the closure on the current stream, after the work that is there."""
    number = next(_numbers)
    _closures[number] = closure
    runtime.npu_emulation_call(_stream(), number)


def finish_stream() -> None:
    """Execute what is queued on the current stream, without counting a synchronisation."""
    runtime.npu_emulation_finish(_stream())
    raise_failures()


def is_running() -> bool:
    """Whether the caller is itself the device's work."""
    return getattr(_this_thread, "running", False)


def is_capturing() -> bool:
    return runtime.npu_emulation_is_capturing(_stream())


@contextlib.contextmanager
def copies_on_device_skipped() -> Iterator[None]:
    """In this thread device-to-device copies are counted and not made."""
    runtime.npu_emulation_skip_copies(True)
    try:
        yield
    finally:
        runtime.npu_emulation_skip_copies(False)


def alias(value: object) -> object:
    """An `npu` tensor as a CPU tensor over the same memory, which it does not keep alive; any other
    value as it is."""
    if not isinstance(value, torch.Tensor) or value.device.type != "npu":
        return value
    storage = value.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    octets = torch.frombuffer(memory, dtype=torch.uint8)
    place = (value.storage_offset(), value.size(), value.stride())
    return torch.empty(0, dtype=value.dtype).set_(octets.untyped_storage(), *place)


def poison(tensor: torch.Tensor) -> None:
    """Overwrite new memory, unless queued work may still be meant to read what was there."""
    storage = tensor.untyped_storage()
    if num_pending() == 0:
        ctypes.memset(storage.data_ptr(), POISON, storage.nbytes())


def poison_host(tensor: torch.Tensor) -> None:
    """Overwrite a buffer of the host that queued work will write."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr() + tensor.storage_offset() * tensor.element_size()
    if tensor.is_contiguous():
        ctypes.memset(start, POISON, tensor.numel() * tensor.element_size())
