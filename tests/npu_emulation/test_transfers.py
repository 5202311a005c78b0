"""What stands in for memfabric's engine moves bytes between registered memory and nothing else; in
no order, over poison, and from memory as it lies when it is sent.

Two engines are two processes' as far as they can tell: they meet by a socket.
"""

from __future__ import annotations

import ctypes
import inspect
from multiprocessing import AuthenticationError

import pytest
import torch

from npu_emulation.counters import num_pending
from npu_emulation.device_work import POISON
from npu_emulation.stand_ins import transfers
from npu_emulation.stand_ins.transfers import FAILED, PIECE, TransferEngine, cut

STORE = "tcp://127.0.0.1:24667"
SIZE = 3 * PIECE + 100
# Names and arguments as memfabric_hybrid 1.3.0 gives them (`TransferEngine.NAME.__doc__`).
MEMFABRIC = {
    "initialize": "store_url session_id role device_id data_op_type store_server_role nic",
    "get_rpc_port": "",
    "batch_register_memory": "buffer_addrs capacities",
    "batch_transfer_sync_write": "dest_session buffers peer_buffers lengths flags",
}


def engine(store: str = STORE, *registered: tuple[int, int]) -> TransferEngine:
    made = TransferEngine()
    assert made.get_rpc_port() == 0
    assert made.initialize(store, "127.0.0.1:0", "Prefill", 0) == 0
    assert made.batch_register_memory(*zip(*registered, strict=True)) == 0
    return made


def session(of: TransferEngine) -> str:
    return f"127.0.0.1:{of.get_rpc_port()}"


class Memory:
    """`SIZE` random or equal bytes, of which all but the first and the last are registered."""

    def __init__(self, fill: int | None = None) -> None:
        filled = torch.full((SIZE,), fill or 0, dtype=torch.uint8)
        self.bytes = torch.randint(0, 256, (SIZE,), dtype=torch.uint8) if fill is None else filled
        self.first, self.length = self.bytes.data_ptr() + 1, SIZE - 2
        self.engine = engine(STORE, (self.first, self.length))


@pytest.fixture
def source() -> Memory:
    return Memory()


@pytest.fixture
def target() -> Memory:
    return Memory(fill=7)


def send(source: Memory, target: Memory, offset: int = 0, more: int = 0) -> int:
    block = [source.first + offset], [target.first + offset], [target.length - offset + more]
    return source.engine.batch_transfer_sync_write(session(target.engine), *block)


def test_its_methods_have_memfabric_s_arguments():
    for name, arguments in MEMFABRIC.items():
        parameters = list(inspect.signature(getattr(TransferEngine, name)).parameters)
        assert parameters == ["self", *arguments.split()]
    assert TransferEngine.TransDataOpType.SDMA.value == 1


def test_sglang_s_engine_is_made_of_it(monkeypatch):
    from sglang.srt.disaggregation.ascend.transfer_engine import AscendTransferEngine
    from sglang.srt.disaggregation.utils import DisaggregationMode

    monkeypatch.setenv("ASCEND_MF_STORE_URL", STORE)
    made = AscendTransferEngine("127.0.0.1", 0, DisaggregationMode.PREFILL)
    assert made.session_id == session(made.engine)
    monkeypatch.setenv("ASCEND_MF_STORE_URL", "127.0.0.1:24667")
    with pytest.raises(RuntimeError, match="initialization failed"):
        AscendTransferEngine("127.0.0.1", 0, DisaggregationMode.DECODE)


def check_arrived(source: Memory, target: Memory) -> None:
    assert torch.equal(target.bytes[1:-1], source.bytes[1:-1])
    assert target.bytes[0] == target.bytes[-1] == 7


def test_every_byte_of_a_transfer_arrives_and_none_beside_it(source, target):
    assert send(source, target) == 0
    check_arrived(source, target)


def test_a_piece_that_is_left_out_is_missed(source, target, monkeypatch):
    monkeypatch.setattr(transfers, "in_no_order", lambda num_pieces: [0, 1, 3])
    assert send(source, target) == 0
    missing = target.bytes[1 + 2 * PIECE : 1 + 3 * PIECE]
    assert missing.tolist() == [POISON] * PIECE
    with pytest.raises(AssertionError):
        check_arrived(source, target)


def test_all_is_poison_between_the_beginning_and_a_piece(source, target):
    pieces = cut(zip([source.first], [target.first], [target.length], strict=True))
    peer = source.engine._begin(session(target.engine), pieces)
    assert peer is not None
    assert target.bytes[1:-1].tolist() == [POISON] * target.length
    assert source.engine._finish(peer, pieces) == 0
    check_arrived(source, target)


def test_pieces_are_sent_in_no_order():
    assert {tuple(transfers.in_no_order(3)) for _ in range(200)} == {
        (0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)
    }  # fmt: skip


@pytest.mark.parametrize(("offset", "more"), [(-1, 0), (0, 1)], ids=["before", "behind"])
def test_what_is_not_registered_is_not_written(source, target, offset, more):
    source.engine.batch_register_memory([source.first - 1], [SIZE])
    assert send(source, target, offset, more) == FAILED
    assert target.bytes.tolist() == [7] * SIZE


def test_what_is_not_registered_is_not_read(source, target):
    target.engine.batch_register_memory([target.first - 1], [SIZE])
    assert send(source, target, -1) == FAILED
    assert target.bytes.tolist() == [7] * SIZE


def test_a_process_of_another_store_is_not_let_in(source, target):
    other = engine("tcp://127.0.0.1:24668", (source.first, source.length))
    block = [source.first], [target.first], [target.length]
    with pytest.raises(AuthenticationError):
        other.batch_transfer_sync_write(session(target.engine), *block)
    assert target.bytes.tolist() == [7] * SIZE
    assert send(source, target) == 0  # it still serves those of its own


def test_what_the_device_has_still_to_write_is_not_waited_for(target):
    """It is sent as it lies there: the sender has to wait for its device."""
    wanted = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    host = wanted.clone().pin_memory()
    device = torch.zeros(SIZE, dtype=torch.uint8).to("npu")
    torch.npu.synchronize()
    device.copy_(host, non_blocking=True)
    sender = engine(STORE, (device.data_ptr(), SIZE))
    block = [device.data_ptr() + 1], [target.first], [target.length]
    assert sender.batch_transfer_sync_write(session(target.engine), *block) == 0
    assert num_pending() > 0
    assert target.bytes[1:-1].tolist() == [POISON] * target.length
    torch.npu.synchronize()
    assert sender.batch_transfer_sync_write(session(target.engine), *block) == 0
    assert torch.equal(target.bytes[1:-1], wanted[1:-1])


def test_memory_of_the_device_is_memory_of_the_process():
    """What the engine writes at an address of a device's tensor is what the device reads."""
    device = torch.zeros(8, dtype=torch.uint8).to("npu")
    torch.npu.synchronize()
    ctypes.memset(device.data_ptr(), 5, 8)
    assert device.tolist() == [5] * 8
