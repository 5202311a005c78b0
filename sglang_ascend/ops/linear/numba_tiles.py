"""Products of bfloat16 in the tiles of AMX, summed in float32: 16 rows of weights times 64 inputs.

One instruction multiplies 32 columns of 16 rows of both, so that 16 inputs take no longer than the
weights take to arrive. These are read where they lie. Of the inputs two columns lie beside each
other, as the instruction takes them. It takes what is too small for a normal number as 0.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_ascend.ops.numba_cache import njit
from sglang_ascend.ops.numba_floats import array_at
from sglang_ascend.ops.numba_threads import take
from sglang_ascend.ops.numba_vectors import VECTOR, has_features, load, prefetch, store

# Of a tile; its rows have 64 bytes, and a cache line has as many.
ROWS, COLUMNS, BYTES = 16, 32, 64
# Groups of ROWS inputs, each with a tile of sums, and one tile more of weights and of inputs.
MOST_GROUPS = 4
_WEIGHTS, _INPUTS, NUM_TILES = range(MOST_GROUPS, MOST_GROUPS + 3)
# Palette 1, from the first row on, and of each of 16 tiles the bytes of a row and the rows.
_OF_OTHERS = [0] * (16 - NUM_TILES)
_SIZES = [BYTES] * NUM_TILES + _OF_OTHERS + [ROWS] * NUM_TILES + _OF_OTHERS
_CONFIGURATION = struct.pack("<2B14x16H16B", 1, 0, *_SIZES)
_BYTE, _INT64 = ir.IntType(8), ir.IntType(64)
_PAIRS, _HALVES = ir.VectorType(ir.IntType(32), ROWS), ir.VectorType(ir.IntType(16), ROWS)


def has_tiles() -> bool:
    """The processor that is compiled for has them, and the system lets this process use them."""
    return has_features("amx-tile", "amx-bf16", "avx512bf16") and torch.cpu._init_amx()


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
def _multiply(typing_context, weights, of_row, inputs, blocks, groups, sums, ahead):
    """sums[group, weight, input] of ROWS rows of weights, ``of_row`` bytes from one to the next,
    over ``blocks`` of COLUMNS, times ``inputs`` as ``_packed`` packs them. What begins at ``ahead``
    is asked for, as many bytes as the weights have. All but the three counts are addresses.
    """

    def codegen(context, builder, signature, arguments):
        weights, of_row, inputs, blocks, groups, sums, ahead = arguments
        for count in range(1, MOST_GROUPS + 1):
            is_count = builder.icmp_signed("==", groups, ir.Constant(groups.type, count))
            with builder.if_then(is_count):
                _multiply_groups(builder, count, (weights, of_row, inputs, blocks, sums, ahead))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7), codegen


def _multiply_groups(builder: Any, count: int, arguments: Any) -> None:
    weights, of_row, inputs, blocks, sums, ahead = arguments
    line = ir.Constant(_INT64, BYTES)

    def pointer(address: Any, block: Any, size: int) -> Any:
        address = builder.add(address, builder.mul(block, ir.Constant(_INT64, size)))
        return builder.inttoptr(address, _BYTE.as_pointer())

    for group in range(count):
        _call(builder, "tilezero", _tile(group))
    with cgutils.for_range(builder, blocks) as loop:
        asked = builder.mul(loop.index, ir.Constant(_INT64, ROWS * BYTES))
        for row in range(ROWS):
            prefetch(builder, builder.add(ahead, asked), row * BYTES, nearest=False)
        of_weights = pointer(weights, loop.index, BYTES)
        _call(builder, "tileloadd64", _tile(_WEIGHTS), of_weights, of_row)
        for group in range(count):
            block = builder.add(loop.index, builder.mul(blocks, ir.Constant(_INT64, group)))
            of_inputs = pointer(inputs, block, ROWS * BYTES)
            _call(builder, "tileloadd64", _tile(_INPUTS), of_inputs, line)
            _call(builder, "tdpbf16ps", *map(_tile, (group, _WEIGHTS, _INPUTS)))
    for group in range(count):
        of_sums = pointer(sums, ir.Constant(_INT64, group), ROWS * BYTES)
        _call(builder, "tilestored64", _tile(group), of_sums, line)


@intrinsic
def _pack(typing_context, rows, of_row, count, packed):
    """A tile of ``count`` rows of the input, turned: to each pair of columns those of all rows."""

    def codegen(context, builder, signature, arguments):
        rows, of_row, count, packed = arguments
        last = builder.sub(count, ir.Constant(_INT64, 1))
        vectors = []
        for number in range(ROWS):  # what is behind the last row is it again
            row = ir.Constant(_INT64, number)
            row = builder.select(builder.icmp_signed("<", row, count), row, last)
            vectors.append(load(builder, builder.add(rows, builder.mul(row, of_row)), _PAIRS))
        for number, vector in enumerate(_turned(builder, vectors)):
            store(builder, vector, builder.add(packed, ir.Constant(_INT64, number * BYTES)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), codegen


@intrinsic
def _write(typing_context, sums, bias, results, of_row, count):
    """sums[weight, input] of ``count`` inputs as bfloat16, to nearest, results[input, weight]; with
    ``bias`` added, the address of ROWS floats, if it is not 0."""

    def codegen(context, builder, signature, arguments):
        sums, bias, results, of_row, count = arguments
        biases = cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [0.0] * ROWS))
        with builder.if_then(builder.icmp_signed("!=", bias, ir.Constant(_INT64, 0))):
            builder.store(load(builder, bias, VECTOR), biases)
        starts = [builder.add(sums, ir.Constant(_INT64, number * BYTES)) for number in range(ROWS)]
        rows = _turned(builder, [load(builder, start, VECTOR) for start in starts])
        # Declared as before LLVM had a type of bfloat16; it reads this as its own.
        shape, name = ir.FunctionType(_HALVES, [VECTOR]), "llvm.x86.avx512bf16.cvtneps2bf16.512"
        narrow = cgutils.get_or_insert_function(builder.module, shape, name)
        for number, row in enumerate(rows):
            row_number = ir.Constant(_INT64, number)
            with builder.if_then(builder.icmp_signed("<", row_number, count)):
                halves = builder.call(narrow, [builder.fadd(row, builder.load(biases))])
                store(builder, halves, builder.add(results, builder.mul(row_number, of_row)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), codegen


def _turned(builder: Any, vectors: list[Any]) -> list[Any]:
    """Lane i of vector j as lane j of vector i."""
    distance = 1
    while distance < ROWS:
        turned = list(vectors)
        for i in range(ROWS):
            if i & distance:
                continue
            pair = vectors[i], vectors[i + distance]
            for place, offset in ((i, 0), (i + distance, distance)):
                # Of the first vector's lanes those without this bit, and the second's next to them.
                lanes = [
                    lane - distance + ROWS + offset if lane & distance else lane + offset
                    for lane in range(ROWS)
                ]
                mask = ir.Constant(ir.VectorType(ir.IntType(32), ROWS), lanes)
                turned[place] = builder.shuffle_vector(*pair, mask)
        vectors, distance = turned, 2 * distance
    return vectors


# Called as the intrinsics that they are in compiled code.
begin: Any = _begin
end: Any = _end
pack: Any = _pack
multiply: Any = _multiply
write: Any = _write


@njit(error_model="numpy")
def work_in_tiles(address):
    """One thread's share of ``numba.multiply``: ROWS rows of weights at a time, as they come. What
    it will take next is asked for while it multiplies."""
    job = array_at(address, (9,), np.int64(0))
    _, weights, of_row, out, width, inputs, num_rows, bias, output = job
    groups, blocks = (num_rows + ROWS - 1) // ROWS, width // COLUMNS
    packed = _packed(inputs, num_rows, of_row, groups, blocks)
    sums = np.empty((groups, ROWS, ROWS), np.float32)
    begin()
    taken, last = take(address, ROWS), out - ROWS
    while taken < out:
        after = take(address, ROWS)
        # The last rows may have been multiplied before: they are the same again.
        first = min(taken, last)
        part, ahead = weights + first * of_row, weights + min(after, last) * of_row
        # Addresses of arrays that are used again, for their memory lives no longer than that.
        multiply(part, of_row, packed.ctypes.data, blocks, groups, sums.ctypes.data, ahead)
        of_bias = bias + 4 * first if bias else 0
        for group in range(groups):
            row = group * ROWS
            results = output + 2 * (row * out + first)
            write(sums[group].ctypes.data, of_bias, results, 2 * out, num_rows - row)
        taken = after
    end()


@njit(error_model="numpy")
def _packed(inputs, num_rows, of_row, groups, blocks):
    """[group, block of columns, pair, input], from the start of a cache line on."""
    memory = np.empty(groups * blocks * ROWS * ROWS + BYTES // 4, np.uint32)
    start = -memory.ctypes.data % BYTES // 4
    packed = memory[start : start + groups * blocks * ROWS * ROWS].reshape(
        groups, blocks, ROWS, ROWS
    )
    for group in range(groups):
        row = group * ROWS
        for block in range(blocks):
            rows, place = inputs + row * of_row + block * BYTES, packed[group, block].ctypes.data
            pack(rows, of_row, num_rows - row, place)
    return packed
