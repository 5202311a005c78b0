"""Tensors beside memory that nobody may touch, and a process in which touching it is survived."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "llvmlite.binding"])
STATUS = {True: 0, False: 10}  # 1 is an exception
PROT_NONE = 0
PAGE = mmap.PAGESIZE


def guarded_copy(tensor: torch.Tensor, at_end: bool) -> torch.Tensor:
    """``tensor`` with a forbidden page right behind its last element, or right before its first."""
    num_bytes = tensor.numel() * tensor.element_size()
    size = -(-num_bytes // PAGE) * PAGE
    memory = mmap.mmap(-1, size + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for forbidden in (address, address + PAGE + size):
        if libc.mprotect(ctypes.c_void_p(forbidden), ctypes.c_size_t(PAGE), PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE + (size - num_bytes if at_end else 0)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    copy.copy_(tensor.reshape(-1))
    return copy.view(tensor.shape)


def in_a_process(function: Callable[..., bool], *arguments: Any) -> bool | None:
    """What a module's ``function`` returns in a process of its own; None where accesses end that.

    Not a copy of this one, whose other threads could leave it with locks that nobody frees.
    """
    process = PROCESSES.Process(target=_exit_with, args=(function, arguments))
    process.start()
    process.join()
    if process.exitcode in (-signal.SIGSEGV, -signal.SIGBUS):
        return None
    if process.exitcode not in STATUS.values():
        raise RuntimeError(f"the process ended with {process.exitcode}.")
    return process.exitcode == STATUS[True]


def _exit_with(function: Callable[..., bool], arguments: tuple[Any, ...]) -> None:
    sys.exit(STATUS[function(*arguments)])
