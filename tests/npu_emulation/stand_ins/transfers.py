"""memfabric's transfer engine, through which SGLang's `ascend` backend sends a KV cache, between
processes of one machine.

An emulated device's memory is memory of its process. Another process writes into what is
registered, and nowhere else, through a socket on 127.0.0.1. A transfer is as late and as disorderly
as its caller must expect: from its beginning the whole destination is poison, its pieces arrive in
no order, and the source is read as it lies, whatever the device has still to write there.
"""

from __future__ import annotations

import ctypes
import json
import random
import struct
import sys
import types
from collections.abc import Iterable, Sequence
from enum import Enum
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from threading import Thread
from typing import NamedTuple
from urllib.parse import urlsplit

from npu_emulation.device_work import POISON

STAND_INS = (
    (
        "`memfabric_hybrid`",
        "`srt/disaggregation/ascend/transfer_engine.py`",
        "pieces through a socket, in no order",
    ),
)

HOST = "127.0.0.1"
PIECE = 1 << 14  # bytes
NUMBER = struct.Struct("<Q")  # of a piece, before its bytes
BEGUN, REFUSED, END, DONE = b"begun", b"refused", b"", b"done"
FAILED = -1


class Piece(NamedTuple):
    source: int
    destination: int
    length: int


class TransDataOpType(Enum):
    SDMA = 1


class TransferEngine:
    """What SGLang calls of it, with memfabric's arguments; 0 is success."""

    TransDataOpType = TransDataOpType

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []  # first address, length
        self.listener: Listener | None = None

    def initialize(
        self,
        store_url: str,
        session_id: str,
        role: str,
        device_id: int,
        data_op_type: TransDataOpType = TransDataOpType.SDMA,
        store_server_role: str = "Decode",
        nic: str = "",
    ) -> int:
        """Processes meet that name the same store."""
        if not _is_store(store_url):
            return FAILED
        self.store = store_url.encode()
        self.listener = Listener((HOST, 0), backlog=8, authkey=self.store)
        Thread(target=self._serve, args=(self.listener,), daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        """0 before `initialize`."""
        return self.listener.address[1] if self.listener else 0

    def batch_register_memory(self, buffer_addrs: Sequence[int], capacities: Sequence[int]) -> int:
        self.registered += zip(buffer_addrs, capacities, strict=True)
        return 0

    def batch_transfer_sync_write(
        self,
        dest_session: str,
        buffers: Sequence[int],
        peer_buffers: Sequence[int],
        lengths: Sequence[int],
        flags: int = 0,
    ) -> int:
        """Waits until the last piece is in the memory of the process whose session it is."""
        pieces = cut(zip(buffers, peer_buffers, lengths, strict=True))
        if not all(self._holds(piece.source, piece.length) for piece in pieces):
            return FAILED
        peer = self._begin(dest_session, pieces)
        return FAILED if peer is None else self._finish(peer, pieces)

    def _begin(self, session: str, pieces: Sequence[Piece]) -> Connection | None:
        """None if the other process has not registered what is to be written."""
        peer = Client((HOST, int(session.rpartition(":")[2])), authkey=self.store)
        peer.send_bytes(json.dumps([piece[1:] for piece in pieces]).encode())
        if peer.recv_bytes() == BEGUN:
            return peer
        peer.close()
        return None

    def _finish(self, peer: Connection, pieces: Sequence[Piece]) -> int:
        with peer:
            for number in in_no_order(len(pieces)):
                source, _, length = pieces[number]
                peer.send_bytes(NUMBER.pack(number) + ctypes.string_at(source, length))
            peer.send_bytes(END)
            return 0 if peer.recv_bytes() == DONE else FAILED

    def _holds(self, address: int, length: int) -> bool:
        ranges = self.registered
        return any(first <= address <= address + length <= first + size for first, size in ranges)

    def _serve(self, listener: Listener) -> None:
        while True:
            try:
                peer = listener.accept()
            except AuthenticationError:  # of another store
                continue
            Thread(target=self._receive, args=(peer,), daemon=True).start()

    def _receive(self, peer: Connection) -> None:
        with peer:
            places = json.loads(peer.recv_bytes())
            if not all(self._holds(*place) for place in places):
                return peer.send_bytes(REFUSED)
            for address, length in places:
                ctypes.memset(address, POISON, length)
            peer.send_bytes(BEGUN)
            while piece := peer.recv_bytes():
                address, length = places[NUMBER.unpack_from(piece)[0]]
                data = piece[NUMBER.size :]
                ctypes.memmove(address, data, min(length, len(data)))
            peer.send_bytes(DONE)


def cut(blocks: Iterable[tuple[int, int, int]]) -> list[Piece]:
    return [
        Piece(source + start, destination + start, min(PIECE, length - start))
        for source, destination, length in blocks
        for start in range(0, length, PIECE)
    ]


def in_no_order(num_pieces: int) -> list[int]:
    return random.sample(range(num_pieces), num_pieces)


def create_config_store(store_url: str) -> int:
    """Of memfabric: where its engines find each other. Here their sessions have ports enough."""
    return 0 if _is_store(store_url) else FAILED


def _is_store(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "tcp" and parts.port is not None


def install() -> None:
    module = types.ModuleType("memfabric_hybrid")
    vars(module).update(TransferEngine=TransferEngine, create_config_store=create_config_store)
    sys.modules.setdefault(module.__name__, module)
