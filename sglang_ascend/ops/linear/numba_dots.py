"""Dot products of rows of float32 in Numba's kernels; weights may be the bits of bfloat16.

What is in memory arrives while what was there before is multiplied: the next rows of weights are
asked for ahead, for a processor does not foresee several rows at once.
Numba's cache does not look in here: remove ``__pycache__`` of the kernels after a change.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_ascend.ops.numba_vectors import (
    FOUR,
    LANES,
    VECTOR,
    load,
    load_widened,
    prefetch,
    sum_of_each,
)

# Rows of weights that are multiplied at once with up to four of the input: as many sums as hide the
# latency of an addition and leave registers.
WEIGHTS, INPUTS = 2, 4
BYTES_AHEAD = 4096
INT32 = ir.IntType(32)


def _float_dots(num_weights: int, num_inputs: int) -> Any:
    """(element of a weight, weights, inputs, columns, totals, floats from row to row): writes
    totals[input, weight]. Weights, inputs and totals are addresses, of contiguous rows.

    A sum is made in one order whatever ``num_weights`` and ``num_inputs`` are.
    """

    @intrinsic
    def dots(typingctx, element, weights, inputs, columns, totals, stride):
        def codegen(context, builder, signature, arguments):
            _, weights, inputs, columns, totals, stride = arguments
            shape = ir.FunctionType(VECTOR, [VECTOR] * 3)
            name = f"llvm.fma.v{LANES}f32"
            multiply_add = cgutils.get_or_insert_function(builder.module, shape, name)

            def of_type(number):
                return ir.Constant(columns.type, number)

            def rows_at(address, size_of_one, number):
                of_row = builder.mul(columns, of_type(size_of_one))
                return [
                    builder.add(address, builder.mul(of_row, of_type(i))) for i in range(number)
                ]

            zero = ir.Constant(VECTOR, [0.0] * LANES)
            places = [(w, x) for w in range(num_weights) for x in range(num_inputs)]
            sums = {place: cgutils.alloca_once_value(builder, zero) for place in places}
            is_narrow = element == types.uint16
            of_weights = rows_at(weights, 2 if is_narrow else 4, num_weights)
            of_inputs = rows_at(inputs, 4, num_inputs)
            with cgutils.for_range(builder, builder.sdiv(columns, of_type(LANES))) as loop:
                offset = builder.mul(loop.index, of_type(4 * LANES))
                at_weight = builder.udiv(offset, of_type(2 if is_narrow else 1))
                rows = [_weights_at(builder, row, at_weight, is_narrow) for row in of_weights]
                for x, of_input in enumerate(of_inputs):
                    values = load(builder, builder.add(of_input, offset), VECTOR)
                    for w, row in enumerate(rows):
                        total = builder.call(multiply_add, [row, values, builder.load(sums[w, x])])
                        builder.store(total, sums[w, x])
            for x in range(num_inputs):
                of_input = [builder.load(sums[w, x]) for w in range(num_weights)]
                total = sum_of_each(builder, [*of_input, zero, zero, zero][:FOUR], builder.fadd)
                mask = ir.Constant(ir.VectorType(INT32, num_weights), [*range(num_weights)])
                total = builder.shuffle_vector(total, total, mask)
                place = builder.add(totals, builder.mul(stride, of_type(4 * x)))
                at = builder.inttoptr(place, total.type.as_pointer())
                builder.store(total, at).align = 4
            return context.get_dummy_value()

        return types.void(element, *[types.intp] * 5), codegen

    return dots


def _weights_at(builder: Any, row: Any, offset: Any, is_narrow: bool) -> Any:
    """Of a row of weights, as float32; the next rows are asked for."""
    address = builder.add(row, offset)
    prefetch(builder, address, BYTES_AHEAD)
    return load_widened(builder, address, VECTOR, is_narrow)


# Called as the intrinsics that they make in compiled code.
dots_of_four_inputs: Any = _float_dots(WEIGHTS, 4)
dots_of_three_inputs: Any = _float_dots(WEIGHTS, 3)
dots_of_two_inputs: Any = _float_dots(WEIGHTS, 2)
dots_of_input: Any = _float_dots(WEIGHTS, 1)
dots_of_pair: Any = _float_dots(1, 1)
