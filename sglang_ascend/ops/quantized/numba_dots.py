"""Dot products of int8 rows in Numba's kernels, exact on any processor.

With AVX-512 VNNI by vpdpbusd, which adds four products of an unsigned and a signed byte to an int32
without saturating; else by a loop, of which LLVM makes 16-bit products and 32-bit sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_ascend.ops.numba_cache import njit
from sglang_ascend.ops.numba_floats import array_at
from sglang_ascend.ops.numba_vectors import FOUR, has_features, load, sum_of_each

# Rows of weights, and of the input, that one pass over columns multiplies with each other.
TILE = FOUR
# Bytes of a vector, and of the smallest that is common as a group of columns.
BLOCK, SMALL_BLOCK = 64, 32


HAS_VNNI = has_features("avx512vnni", "avx512vl")
# What the input's codes are stored with, for vpdpbusd takes them unsigned: a sum is too large by as
# many times that of the weights.
OFFSET = 128 if HAS_VNNI else 0
CODE = np.uint8(0) if HAS_VNNI else np.int8(0)


def _vnni_dots(num_weights, num_inputs, block):
    """(weights, bytes from row to row, inputs, bytes from row to row, blocks, totals, int32s from
    row to row): adds to totals[input, weight]. Weights, inputs and totals are addresses."""

    @intrinsic
    def dots(typingctx, weights, weight_stride, inputs, input_stride, blocks, totals, stride):
        def codegen(context, builder, signature, arguments):
            weights, weight_stride, inputs, input_stride, blocks, totals, stride = arguments
            int32, lanes = ir.IntType(32), block // 4
            vector = ir.VectorType(int32, lanes)
            shape = ir.FunctionType(vector, [vector] * 3)
            name = f"llvm.x86.avx512.vpdpbusd.{8 * block}"
            multiply = cgutils.get_or_insert_function(builder.module, shape, name)

            def rows_at(address, stride, number):
                for _ in range(number):
                    yield load(builder, address, vector)
                    address = builder.add(address, stride)

            zero = ir.Constant(vector, [0] * lanes)
            places = [(w, x) for w in range(num_weights) for x in range(num_inputs)]
            sums = {place: cgutils.alloca_once_value(builder, zero) for place in places}
            with cgutils.for_range(builder, blocks) as loop:
                offset = builder.mul(loop.index, ir.Constant(loop.index.type, block))
                codes = list(rows_at(builder.add(inputs, offset), input_stride, num_inputs))
                rows = rows_at(builder.add(weights, offset), weight_stride, num_weights)
                for w, row in enumerate(rows):
                    for x, code in enumerate(codes):
                        total = builder.load(sums[w, x])
                        builder.store(builder.call(multiply, [total, code, row]), sums[w, x])
            for x in range(num_inputs):
                of_input = [builder.load(sums[w, x]) for w in range(num_weights)]
                total = sum_of_each(builder, of_input, builder.add)
                place = builder.mul(stride, ir.Constant(stride.type, 4 * x))
                at = builder.inttoptr(builder.add(totals, place), total.type.as_pointer())
                held = builder.load(at)
                held.align = 4
                builder.store(builder.add(held, total), at).align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), codegen

    return dots


# Called as the intrinsics that they make in compiled code.
dots_of_tile: Any = _vnni_dots(TILE, TILE, BLOCK)
dots_of_input: Any = _vnni_dots(TILE, 1, BLOCK)
dots_of_pair: Any = _vnni_dots(1, 1, BLOCK)
dots_of_small_tile: Any = _vnni_dots(TILE, TILE, SMALL_BLOCK)
dots_of_small_input: Any = _vnni_dots(TILE, 1, SMALL_BLOCK)
dots_of_small_pair: Any = _vnni_dots(1, 1, SMALL_BLOCK)


@njit(error_model="numpy")
def add_dots(weights, stride, count, codes, width, start, stop, totals):
    """Adds to totals[row, w] the products over columns start..stop, in vectors where they fit."""
    rest = start
    if HAS_VNNI:
        rest = start + (stop - start) // SMALL_BLOCK * SMALL_BLOCK
        at_weights, at_codes = weights + start, codes + start
        _add_vectors(at_weights, stride, count, at_codes, width, rest - start, totals)
    if rest < stop:
        for w in range(count):
            of_weights = array_at(weights + w * stride + rest, (stop - rest,), np.int8(0))
            for row in range(len(totals)):
                inputs = array_at(codes + row * width + rest, (stop - rest,), CODE)
                total = np.int32(0)
                for d in range(stop - rest):
                    total += np.int32(of_weights[d]) * np.int32(inputs[d])
                totals[row, w] += total


@njit(error_model="numpy")
def _add_vectors(weights, weight_stride, count, codes, stride, size, totals):
    """``size`` columns, a multiple of SMALL_BLOCK."""
    (num_rows, part), blocks = totals.shape, size // BLOCK
    whole = blocks * BLOCK
    w = 0
    while w < count:
        num_weights, row = (TILE if w + TILE <= count else 1), 0
        while row < num_rows:
            x, sums = codes + row * stride, totals.ctypes.data + 4 * (row * part + w)
            tail, tail_x = weights + whole, x + whole
            if num_weights == 1:
                dots_of_pair(weights, weight_stride, x, stride, blocks, sums, part)
                if whole < size:
                    dots_of_small_pair(tail, weight_stride, tail_x, stride, 1, sums, part)
                row += 1
            elif row + TILE <= num_rows:
                dots_of_tile(weights, weight_stride, x, stride, blocks, sums, part)
                if whole < size:
                    dots_of_small_tile(tail, weight_stride, tail_x, stride, 1, sums, part)
                row += TILE
            else:
                dots_of_input(weights, weight_stride, x, stride, blocks, sums, part)
                if whole < size:
                    dots_of_small_input(tail, weight_stride, tail_x, stride, 1, sums, part)
                row += 1
        weights += num_weights * weight_stride
        w += num_weights
