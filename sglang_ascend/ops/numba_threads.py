"""Numba's kernels on the threads that PyTorch's own operators run on.

A pool of Numba's own would spin on the cores while PyTorch's does. So a region is entered as
compiled C enters it, by ``GOMP_parallel`` of the OpenMP library that PyTorch has loaded; where that
library has another interface, the calling thread does all the work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


@cache
def parallel_region() -> int:
    """The address of ``GOMP_parallel``, or 0."""
    try:
        function = ctypes.CDLL(str(_LIBRARY)).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


# Of a region.
num_threads: Callable[[], int] = torch.get_num_threads if parallel_region() else lambda: 1


@intrinsic
def _run_on_threads(typing_context, region, work, data, num_threads):
    """``work(data)`` in each of ``num_threads`` threads; returns when all have.

    ``region`` is what ``parallel_region`` returned, ``work`` the address of a ``cfunc`` of
    signature void(intp).
    """

    def codegen(context, builder, signature, arguments):
        region, work, data, num_threads = arguments
        byte, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        of_work = ir.FunctionType(ir.VoidType(), [byte]).as_pointer()
        of_region = ir.FunctionType(ir.VoidType(), [of_work, byte, int32, int32]).as_pointer()
        function, pointer = builder.inttoptr(work, of_work), builder.inttoptr(data, byte)
        is_alone = builder.icmp_signed("<=", num_threads, ir.Constant(num_threads.type, 1))
        with builder.if_else(is_alone) as (alone, together):
            with alone:
                builder.call(function, [pointer])
            with together:
                count = builder.trunc(num_threads, int32)
                zero = ir.Constant(int32, 0)
                enter = builder.inttoptr(region, of_region)
                builder.call(enter, [function, pointer, count, zero])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), codegen


@intrinsic
def _take(typing_context, counter, amount):
    """Adds ``amount`` to the int64 at the address ``counter``, and returns what it was before: the
    next part of the work, for whichever thread comes first."""

    def codegen(context, builder, signature, arguments):
        address, amount = arguments
        pointer = builder.inttoptr(address, ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, amount, "monotonic")

    return types.int64(types.intp, types.int64), codegen


# Called as the intrinsics that they are in compiled code.
run_on_threads: Any = _run_on_threads
take: Any = _take
