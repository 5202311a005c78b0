"""How often the latent kernels read the cache in a step: bytes counted at the interpreter's loads,
relative to one read of every key. On an NPU a cache may serve some of them; nothing is timed.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from paged_batch import agrees, uniform_batch

from sglang_ascend.ops.attention import tiles, triton
from sglang_ascend.ops.attention.tiles import ASCEND, ASCEND_950, choose_turns

pytestmark = pytest.mark.usefixtures("triton_interpreter")

RANK, ROPE = 512, 64
PAGE_SIZE = 128
LENGTHS = (261,)  # two tiles and a part
CHIPS = pytest.mark.parametrize("machine", [ASCEND, ASCEND_950], ids=["a2-a3", "950"])


@dataclass
class Loads:
    """Bytes that a kernel loads from each of several tensors."""

    spans: list[tuple[int, int]]
    num_bytes: list[int]

    def note(self, pointers, mask) -> None:
        for place, (first, end) in enumerate(self.spans):
            read = (pointers.data >= first) & (pointers.data < end) & mask.data
            element_bytes = pointers.get_element_ty().primitive_bitwidth // 8
            self.num_bytes[place] += int(read.sum()) * element_bytes


def loads_of(tensors, monkeypatch) -> Loads:
    from triton.runtime.interpreter import InterpreterBuilder

    spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
    loads = Loads(spans, [0] * len(spans))
    honest = InterpreterBuilder.create_masked_load

    def create_masked_load(builder, pointers, mask, *arguments):
        loads.note(pointers, mask)
        return honest(builder, pointers, mask, *arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", create_masked_load)
    return loads


def reads_of_the_cache(machine, num_heads, query_len, monkeypatch, lengths=LENGTHS) -> float:
    """Bytes read of the cache by one call, over the bytes of the keys that its requests have."""
    monkeypatch.setattr(triton, "machine_of", lambda device: machine)
    shape = (num_heads, RANK, ROPE)
    batch = uniform_batch(shape, query_len, PAGE_SIZE, torch.float32, True, lengths, float("nan"))
    loads = loads_of([batch.key_cache], monkeypatch)
    assert agrees(batch.mla(name="triton"), batch.expected())
    return loads.num_bytes[0] / (4 * (RANK + ROPE) * sum(lengths))


def in_bf16(machine):
    """The tiles of bf16 for tensors of fp32, which the interpreter multiplies exactly."""
    return replace(machine, factor_bytes=2 * machine.factor_bytes)


@CHIPS
@pytest.mark.parametrize(("num_heads", "query_len"), [(8, 4), (16, 4)])
def test_64_rows_read_the_cache_once(num_heads, query_len, machine, monkeypatch):
    reads = reads_of_the_cache(in_bf16(machine), num_heads, query_len, monkeypatch)
    assert reads <= 1.1


def test_512_rows_read_it_twice(monkeypatch):
    """H = 128 and K = 3: their sums are 1 MiB."""
    assert reads_of_the_cache(in_bf16(ASCEND), 128, 4, monkeypatch, lengths=(130,)) <= 2.2


def test_rows_that_do_not_share_their_tiles_would_be_counted(monkeypatch):
    """The control: one block of 16 rows a program."""
    monkeypatch.setattr(triton, "choose_turns", lambda *_: 1)
    machine = replace(in_bf16(ASCEND), max_block_m=16)
    assert reads_of_the_cache(machine, 16, 4, monkeypatch) == 4.0


@pytest.mark.parametrize(
    ("num_rows", "turns"), [(64, 0), (65, 2), (256, 4), (257, 3), (512, 4), (1024, 4)]
)
def test_rows_take_turns_in_even_numbers(num_rows, turns):
    assert choose_turns(ASCEND, num_rows, 64) == turns
    assert choose_turns(tiles.H100, num_rows, 64) == 0
