"""Products of bfloat16 in the tiles of AMX, summed in float32: 16 rows of weights times 16 inputs.

One instruction multiplies 32 columns of both, so that 16 inputs take the time of one: that in which
the weights arrive. These are read where they lie. Of the inputs two columns lie beside each other,
as the instruction takes them. It takes what is too small for a normal number as 0.
Numba's cache does not look in here: remove ``__pycache__`` of the kernels after a change.
"""

from __future__ import annotations

import struct
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_ascend.ops.numba_floats import array_at, narrow
from sglang_ascend.ops.numba_threads import take
from sglang_ascend.ops.numba_vectors import has_features, prefetch

# Of a tile; its rows have 64 bytes, and a cache line has as many.
ROWS, COLUMNS, BYTES = 16, 32, 64
_SUMS, _WEIGHTS, _INPUTS = NUMBERS = range(3)
# Palette 1, from the first row on, and of each of 16 tiles the bytes of a row and the rows.
_OF_OTHERS = [0] * (16 - len(NUMBERS))
_SIZES = [BYTES] * len(NUMBERS) + _OF_OTHERS + [ROWS] * len(NUMBERS) + _OF_OTHERS
_CONFIGURATION = struct.pack("<2B14x16H16B", 1, 0, *_SIZES)
_BYTE, _INT64 = ir.IntType(8), ir.IntType(64)


def has_tiles() -> bool:
    """The processor that is compiled for has them, and the system lets this process use them."""
    return has_features("amx-tile", "amx-bf16") and torch.cpu._init_amx()


def _call(builder: Any, name: str, *given: Any) -> None:
    shape = ir.FunctionType(ir.VoidType(), [one.type for one in given])
    function = cgutils.get_or_insert_function(builder.module, shape, f"llvm.x86.{name}")
    builder.call(function, given)


def _tile(number: int) -> ir.Constant:
    return ir.Constant(_BYTE, number)


@intrinsic
def _begin(typing_context):
    """Of a thread, before it multiplies."""

    def codegen(context, builder, signature, arguments):
        value = ir.Constant(ir.ArrayType(_BYTE, BYTES), bytearray(_CONFIGURATION))
        place = cgutils.alloca_once_value(builder, value)
        _call(builder, "ldtilecfg", builder.bitcast(place, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _end(typing_context):
    """Of a thread that has multiplied."""

    def codegen(context, builder, signature, arguments):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _multiply(typing_context, weights, of_row, inputs, blocks, sums, ahead):
    """sums[weight, input] of ROWS rows of weights, ``of_row`` bytes from one to the next, over
    ``blocks`` of COLUMNS, times ``inputs`` as ``_packed`` packs them. What begins at ``ahead`` is
    asked for, as many bytes as the weights have. All but the two counts are addresses.
    """

    def codegen(context, builder, signature, arguments):
        weights, of_row, inputs, blocks, sums, ahead = arguments
        line = ir.Constant(_INT64, BYTES)

        def pointer(address: Any, block: Any, size: int) -> Any:
            address = builder.add(address, builder.mul(block, ir.Constant(block.type, size)))
            return builder.inttoptr(address, _BYTE.as_pointer())

        _call(builder, "tilezero", _tile(_SUMS))
        with cgutils.for_range(builder, blocks) as loop:
            asked = builder.mul(loop.index, ir.Constant(blocks.type, ROWS * BYTES))
            for row in range(ROWS):
                prefetch(builder, builder.add(ahead, asked), row * BYTES, nearest=False)
            of_weights = pointer(weights, loop.index, BYTES)
            _call(builder, "tileloadd64", _tile(_WEIGHTS), of_weights, of_row)
            of_inputs = pointer(inputs, loop.index, ROWS * BYTES)
            _call(builder, "tileloadd64", _tile(_INPUTS), of_inputs, line)
            _call(builder, "tdpbf16ps", *map(_tile, NUMBERS))
        first = ir.Constant(blocks.type, 0)
        _call(builder, "tilestored64", _tile(_SUMS), pointer(sums, first, 0), line)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), codegen


# Called as the intrinsics that they are in compiled code.
begin: Any = _begin
end: Any = _end
multiply: Any = _multiply


@numba.njit(cache=True, error_model="numpy")
def work_in_tiles(address):
    """One thread's share of ``numba._multiply``: ROWS rows of weights at a time, as they come. What
    it will take next is asked for while it multiplies."""
    job = array_at(address, (9,), np.int64(0))
    _, weights, of_row, out, width, inputs, num_rows, bias, output = job
    packed, sums = _packed(inputs, num_rows, width), np.empty((ROWS, ROWS), np.float32)
    results = array_at(output, (num_rows, out), np.uint16(0))
    biases = array_at(bias, (out,), np.float32(0))
    begin()
    taken, last = take(address, ROWS), out - ROWS
    while taken < out:
        after = take(address, ROWS)
        # The last rows may have been multiplied before: they are the same again.
        first = min(taken, last)
        part, ahead = weights + first * of_row, weights + min(after, last) * of_row
        # Addresses of arrays that are used again, for their memory lives no longer than that.
        multiply(part, of_row, packed.ctypes.data, width // COLUMNS, sums.ctypes.data, ahead)
        for row in range(num_rows):
            for w in range(ROWS):
                total = sums[w, row]
                if bias:
                    total += biases[first + w]
                results[row, first + w] = narrow(total, np.uint16(0))
        taken = after
    end()


@numba.njit(cache=True, error_model="numpy")
def _packed(inputs, num_rows, width):
    """[pair of columns, input] of [num_rows, width] bfloat16, a pair as 32 bits, from the start of
    a cache line on. What lies behind the last input is anything, and so are its sums."""
    pairs = width // 2
    memory = np.empty(pairs * ROWS + BYTES // 4, np.uint32)
    start = -memory.ctypes.data % BYTES // 4
    packed = memory[start : start + pairs * ROWS].reshape(pairs, ROWS)
    rows = array_at(inputs, (num_rows, pairs), np.uint32(0))
    for row in range(num_rows):
        for pair in range(pairs):
            packed[pair, row] = rows[row, pair]
    return packed
