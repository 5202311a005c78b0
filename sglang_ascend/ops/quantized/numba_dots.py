"""Dot products of int8 rows in Numba's kernels, exact on any processor.

With AVX-512 VNNI by vpdpbusd, which adds four products of an unsigned and a signed byte to an int32
without saturating; else by a loop, of which LLVM makes 16-bit products and 32-bit sums.
Numba's cache does not look in here: remove ``__pycache__`` of the kernels after a change.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Rows of the input that one pass over a row of weights serves.
TILE = 4
# What vpdpbusd takes unsigned is the input's code + 128.
SHIFT = 128
# Bytes of a vector: a group of 32 columns, the smallest that is common, is one.
BLOCK = 32


def _has_vnni() -> bool:
    """Of the processor that Numba compiles for: this one, or NUMBA_CPU_FEATURES."""
    features = numba.config.CPU_FEATURES  # pyright: ignore[reportAttributeAccessIssue]
    if features is None:
        features = llvmlite.binding.get_host_cpu_features().flatten()
    return {"+avx512vnni", "+avx512vl"} <= set(features.split(","))


HAS_VNNI = _has_vnni()


def _vnni_dots(num_rows):
    """(row of weights, first row of the input, bytes from row to row, blocks, totals) addresses."""

    @intrinsic
    def dots(typingctx, weights, inputs, stride, blocks, totals):
        def codegen(context, builder, signature, arguments):
            weights, inputs, stride, blocks, totals = arguments
            int32 = ir.IntType(32)
            vector = ir.VectorType(int32, BLOCK // 4)
            shape = ir.FunctionType(vector, [vector] * 3)
            multiply = cgutils.get_or_insert_function(
                builder.module, shape, "llvm.x86.avx512.vpdpbusd.256"
            )

            def load(address):
                loaded = builder.load(builder.inttoptr(address, vector.as_pointer()))
                loaded.align = 1
                return loaded

            zero = ir.Constant(vector, [0] * (BLOCK // 4))
            # The shift of every input is 128 times the sum of the weights: one more row of 128s.
            shifts = ir.Constant(vector, [int(np.int32(-0x7F7F7F80))] * (BLOCK // 4))
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(num_rows + 1)]
            with cgutils.for_range(builder, blocks) as loop:
                offset = builder.mul(loop.index, ir.Constant(loop.index.type, BLOCK))
                of_weights = load(builder.add(weights, offset))
                at = builder.add(inputs, offset)
                for row in range(num_rows):
                    product = multiply, [builder.load(sums[row]), load(at), of_weights]
                    builder.store(builder.call(*product), sums[row])
                    at = builder.add(at, stride)
                product = multiply, [builder.load(sums[-1]), shifts, of_weights]
                builder.store(builder.call(*product), sums[-1])
            reduce = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(int32, [vector]), "llvm.vector.reduce.add.v8i32"
            )
            shift = builder.load(sums[-1])
            pointer = builder.inttoptr(totals, int32.as_pointer())
            for row in range(num_rows):
                total = builder.call(reduce, [builder.sub(builder.load(sums[row]), shift)])
                builder.store(total, builder.gep(pointer, [ir.Constant(ir.IntType(64), row)]))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), codegen

    return dots


# Called as the intrinsics that they make in compiled code.
dots_of_tile: Any = _vnni_dots(TILE)
dots_of_row: Any = _vnni_dots(1)
