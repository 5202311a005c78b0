"""HCCL's collectives as work of a stream: each runs when its stream is waited for, and exchanges
with the other ranks' processes over gloo.

A rank whose work runs as late as possible can keep a peer waiting for ever, because the hosts may
wait for each other; a real device would go on by itself. So a thread of each rank lets its device
work up to a collective at which a peer has stood for PATIENCE seconds, or stands while this rank's
host waits for the peers' hosts.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.distributed import DistError, PrefixStore, ProcessGroupGloo, TCPStore

from npu_emulation.counters import runtime
from npu_emulation.device_work import run_as_device

HOST = "127.0.0.1"
# A host that is about to wait by itself does so within this time. Where it is slower its device
# works earlier than it has to: a device may, and a missing wait can pass unseen.
PATIENCE, POLL = 2.0, 0.05
TIMEOUT = timedelta(minutes=10)

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST = range(4)  # acl/emulation.h
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "broadcast")
# HcclDataType and HcclReduceOp
DTYPES = {
    0: torch.int8,
    1: torch.int16,
    2: torch.int32,
    3: torch.float16,
    4: torch.float32,
    5: torch.int64,
    7: torch.uint8,
    10: torch.float64,
    11: torch.bfloat16,
}
REDUCTIONS = (torch.add, torch.mul, torch.maximum, torch.minimum)


has_run: Counter[str] = Counter()  # by kind, in this process; those of graphs in every replay


class CollectiveError(RuntimeError):
    """The ranks of a communicator do not run the same collective."""


class Collective(ctypes.Structure):
    _fields_ = [
        ("communicator", ctypes.c_void_p),
        ("kind", ctypes.c_int),
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("type", ctypes.c_int),
        ("reduction", ctypes.c_int),
        ("root", ctypes.c_uint32),
    ]

    def __str__(self) -> str:
        name, dtype = KINDS[self.kind], DTYPES[self.type]
        return f"{name} of {self.count} {dtype}, reduction {self.reduction}, root {self.root}"


def _memory(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over the device's memory."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    octets = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(octets, dtype=dtype)


class Communicator:
    def __init__(self, handle: int, port: int, rank: int, num_ranks: int) -> None:
        self.handle, self.rank = handle, rank
        self.peers = [peer for peer in range(num_ranks) if peer != rank]
        # One of the device, which keeps it while it waits, and one of the thread that watches.
        self.store, self.observer = (
            TCPStore(HOST, port, is_master=False, timeout=TIMEOUT) for _ in range(2)
        )
        self._awaited, self._since = -1, 0.0
        self._error: CollectiveError | None = None
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = TIMEOUT
        self.gloo = ProcessGroupGloo(PrefixStore("gloo", self.store), rank, num_ranks, options)

    def run(self, collective: Collective, number: int) -> None:
        if self._error is not None:
            # The ranks have parted, and none would come: the host is told, and does not wait.
            raise self._error
        self._meet(str(collective), number)
        has_run[KINDS[collective.kind]] += 1
        dtype = DTYPES[collective.type]
        count = collective.count
        all_count = count * (len(self.peers) + 1)
        sent = all_count if collective.kind == REDUCE_SCATTER else count
        received = all_count if collective.kind == ALL_GATHER else count
        source = _memory(collective.source, sent, dtype)
        target = _memory(collective.target, received, dtype)
        if collective.kind == BROADCAST:
            self._broadcast(target, collective.root)
            return
        gathered = self._gather(source)
        if collective.kind == ALL_GATHER:
            target.copy_(torch.cat(gathered))
            return
        if collective.kind == REDUCE_SCATTER:
            gathered = [part.view(-1, count)[self.rank] for part in gathered]
        target.copy_(_reduced(gathered, REDUCTIONS[collective.reduction]))

    def _meet(self, collective: str, number: int) -> None:
        """Say that this rank has come here, and wait for the others."""
        self.store.set(f"{number}/{self.rank}", collective)
        for peer in self.peers:
            theirs = self.store.get(f"{number}/{peer}").decode()
            if theirs != collective:
                self._error = CollectiveError(
                    f"collective {number} is {collective} in rank {self.rank} and {theirs} in "
                    f"rank {peer}: a device would hang."
                )
                raise self._error
        self.store.delete_key(f"{number - 1}/{self.rank}")  # whoever is here has read it

    def go_on_for_peers(self) -> None:
        """Let the device work up to the collective at which peers have waited long enough."""
        number = runtime.npu_emulation_num_run(self.handle)
        if not any(self.observer.check([f"{number}/{peer}"]) for peer in self.peers):
            return
        if self._awaited != number:
            self._awaited, self._since = number, time.monotonic()
        if _hosts_meet or time.monotonic() > self._since + PATIENCE:
            runtime.npu_emulation_run_to_collective(self.handle, number)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = root
        self.gloo.broadcast([tensor.view(torch.uint8)], options).wait()

    def _gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(part) for _ in range(len(self.peers) + 1)]
        octets = [part.view(torch.uint8) for part in parts]
        self.gloo.allgather([octets], [part.view(torch.uint8)]).wait()
        return parts


def _reduced(
    parts: list[torch.Tensor], operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """In the ranks' order, so that every rank has the same bits."""
    result = parts[0]
    for part in parts[1:]:
        result = operation(result, part)
    return result


_hosts_meet = False


@contextmanager
def hosts_meet() -> Iterator[None]:
    """Around what keeps this host until its peers' have come to it, who may wait for the device."""
    global _hosts_meet
    _hosts_meet = True
    try:
        yield
    finally:
        _hosts_meet = False


_roots: list[TCPStore] = []
_communicators: dict[int, Communicator] = {}  # by the runtime's handle


def _describe_root(root: int) -> None:
    """What the first rank tells the others: where they meet."""
    _roots.append(TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT))
    ctypes.memmove(root, str(_roots[-1].port).encode(), len(str(_roots[-1].port)))


def _join(handle: int, root: bytes, rank: int, num_ranks: int) -> None:
    _communicators[handle] = Communicator(handle, int(root), rank, num_ranks)
    _watch()


def _run(collective: Any, number: int) -> None:
    wanted = collective.contents
    run_as_device(lambda: _communicators[wanted.communicator].run(wanted, number))


@cache
def _watch() -> None:
    """Start the thread that goes on for peers, once; it ends before the interpreter does."""
    ended = threading.Event()
    thread = threading.Thread(target=_go_on_for_peers, args=(ended,), daemon=True)
    thread.start()
    atexit.register(thread.join)
    atexit.register(ended.set)


def _go_on_for_peers(ended: threading.Event) -> None:
    while not ended.wait(POLL):
        for communicator in list(_communicators.values()):
            try:
                communicator.go_on_for_peers()
            except DistError:  # the first rank has ended
                return


class _Exchange(ctypes.Structure):
    _fields_ = [
        ("describe_root", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        (
            "join",
            ctypes.CFUNCTYPE(
                None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32
            ),
        ),
        ("run", ctypes.CFUNCTYPE(None, ctypes.POINTER(Collective), ctypes.c_uint64)),
    ]


runtime.npu_emulation_num_run.argtypes = [ctypes.c_void_p]
runtime.npu_emulation_num_run.restype = ctypes.c_uint64
runtime.npu_emulation_run_to_collective.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
runtime.npu_emulation_run_to_collective.restype = None
runtime.npu_emulation_set_exchange.argtypes = [_Exchange]
runtime.npu_emulation_set_exchange.restype = None

_functions = dict(_Exchange._fields_)
_exchange = _Exchange(
    _functions["describe_root"](_describe_root), _functions["join"](_join), _functions["run"](_run)
)
runtime.npu_emulation_set_exchange(_exchange)
