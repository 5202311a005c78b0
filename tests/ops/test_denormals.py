"""Attention on the CPU computes neither with what memory happened to hold nor with tiny weights.

The results would not show it. But bits of other data, such as addresses, often are denormal
floats, and a product of one takes a processor many times as long: attention took five times as
long in one process as in another.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from paged_batch import agrees, uniform_batch

DENORMAL = 1e-40
LENGTHS = [200, 31, 64]
LIBM = ctypes.CDLL("libm.so.6")
# Of x86-64's fenv_t: where MXCSR lies, and its flag of a denormal operand.
SIZE, MXCSR, DENORMAL_OPERAND = 32, 28, 2

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="reads MXCSR, which x86-64 has"
)


def meets_denormals(call: Callable[[], object]) -> bool:
    """Whether this thread computes with a denormal operand in ``call``."""
    environment = ctypes.create_string_buffer(SIZE)
    LIBM.fegetenv(environment)
    (flags,) = struct.unpack_from("I", environment, MXCSR)
    struct.pack_into("I", environment, MXCSR, flags & ~DENORMAL_OPERAND)
    LIBM.fesetenv(environment)
    call()
    LIBM.fegetenv(environment)
    return bool(struct.unpack_from("I", environment, MXCSR)[0] & DENORMAL_OPERAND)


def leave_denormals_behind() -> None:
    """In memory that is free, of all sizes that attention asks for."""
    for size in range(1, 17):
        _ = [np.full(1024 * size, DENORMAL, np.float32) for _ in range(16)]


@pytest.fixture(autouse=True)
def one_thread():
    """The one whose flags are read."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_reads_only_what_it_wrote(dtype, query_len):
    """Values that fill no whole vectors: a latent of 88, heads of 72."""
    gqa = uniform_batch((6, 2, 72), query_len, 1, dtype, lengths=LENGTHS)
    mla = uniform_batch((6, 88, 32), query_len, 1, dtype, True, lengths=LENGTHS)
    for call in (lambda: gqa.gqa("numba"), lambda: mla.mla(name="numba")):
        call()  # compiles it
        leave_denormals_behind()
        assert not meets_denormals(call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_that_hardly_count_have_no_weight(dtype):
    """Scores that are 60 apart and more, and 180, as in a model whose attention is sharp."""
    batch = uniform_batch((6, 80, 32), 4, 1, dtype, True, lengths=LENGTHS)
    batch.scale *= 10
    assert agrees(batch.mla(name="numba"), batch.expected())
    batch.scale *= 3
    assert not meets_denormals(lambda: batch.mla(name="numba"))


def test_a_denormal_operand_would_be_seen():
    batch = uniform_batch((6, 80, 32), 4, 1, torch.float32, True, lengths=LENGTHS)
    batch.mla(name="numba")
    assert not meets_denormals(lambda: batch.mla(name="numba"))
    batch.queries[0][:] = DENORMAL
    assert meets_denormals(lambda: batch.mla(name="numba"))
