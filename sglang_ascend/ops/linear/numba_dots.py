"""Dot products of rows in Numba's kernels, summed in float32; a row is float32 or bfloat16's bits.

Where both rows are bfloat16's and the processor has AVX512-BF16, vdpbf16ps adds two products to a
sum at once; it takes what is too small for a normal number as 0. Else bfloat16 is widened.
What is in memory arrives while what was there before is multiplied: the next rows of weights are
asked for ahead, for a processor does not foresee several rows at once.
Numba's cache does not look in here: remove ``__pycache__`` of the kernels after a change.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from sglang_ascend.ops.numba_vectors import (
    FOUR,
    LANES,
    VECTOR,
    has_features,
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
HAS_PAIRS = has_features("avx512bf16")
PAIRS = ir.VectorType(INT32, LANES)


def _are_pairs(of_weight: Any, of_input: Any) -> bool:
    return HAS_PAIRS and of_weight == of_input == types.uint16


def columns_of_vector(of_weight: Any, of_input: Any) -> Any:
    """How many columns are multiplied at once; those behind the last such are left out."""


@overload(columns_of_vector)
def _columns_of_vector(of_weight, of_input):
    columns = 2 * LANES if _are_pairs(of_weight, of_input) else LANES
    return lambda of_weight, of_input: columns


def _dots(num_weights: int, num_inputs: int) -> Any:
    """(element of a weight, of an input, weights, inputs, columns, totals, floats from row to row):
    writes totals[input, weight]. Weights, inputs and totals are addresses, of contiguous rows.

    A sum is made in one order whatever ``num_weights`` and ``num_inputs`` are.
    """

    @intrinsic
    def dots(typingctx, of_weight, of_input, weights, inputs, columns, totals, stride):
        are_pairs = _are_pairs(of_weight, of_input)
        at_once = 2 * LANES if are_pairs else LANES

        def codegen(context, builder, signature, arguments):
            weights, inputs, columns, totals, stride = arguments[2:]

            def of_type(number):
                return ir.Constant(columns.type, number)

            def bytes_of(element, count):
                return builder.mul(count, of_type(element.bitwidth // 8))

            def rows_at(address, element, number):
                of_row = bytes_of(element, columns)
                return [
                    builder.add(address, builder.mul(of_row, of_type(i))) for i in range(number)
                ]

            zero = ir.Constant(VECTOR, [0.0] * LANES)
            places = [(w, x) for w in range(num_weights) for x in range(num_inputs)]
            sums = {place: cgutils.alloca_once_value(builder, zero) for place in places}
            weight_rows = rows_at(weights, of_weight, num_weights)
            input_rows = rows_at(inputs, of_input, num_inputs)
            with cgutils.for_range(builder, builder.sdiv(columns, of_type(at_once))) as loop:
                column = builder.mul(loop.index, of_type(at_once))
                at_weight, at_input = (bytes_of(one, column) for one in (of_weight, of_input))
                multiplied = []
                for row in weight_rows:
                    address = builder.add(row, at_weight)
                    prefetch(builder, address, BYTES_AHEAD)
                    multiplied.append(_operand(builder, address, of_weight, are_pairs))
                for x, row in enumerate(input_rows):
                    values = _operand(builder, builder.add(row, at_input), of_input, are_pairs)
                    for w, weight in enumerate(multiplied):
                        total = _add_products(builder, builder.load(sums[w, x]), weight, values)
                        builder.store(total, sums[w, x])
            for x in range(num_inputs):
                of_one = [builder.load(sums[w, x]) for w in range(num_weights)]
                total = sum_of_each(builder, [*of_one, zero, zero, zero][:FOUR], builder.fadd)
                mask = ir.Constant(ir.VectorType(INT32, num_weights), [*range(num_weights)])
                total = builder.shuffle_vector(total, total, mask)
                place = builder.add(totals, builder.mul(stride, of_type(4 * x)))
                at = builder.inttoptr(place, total.type.as_pointer())
                builder.store(total, at).align = 4
            return context.get_dummy_value()

        return types.void(of_weight, of_input, *[types.intp] * 5), codegen

    return dots


def _operand(builder: Any, address: Any, element: Any, are_pairs: bool) -> Any:
    """Of a row, as it is multiplied: pairs of bfloat16, or float32."""
    if are_pairs:
        return load(builder, address, PAIRS)
    return load_widened(builder, address, VECTOR, element == types.uint16)


def _add_products(builder: Any, total: Any, weight: Any, values: Any) -> Any:
    if weight.type == PAIRS:
        # Declared as before LLVM had a type of bfloat16; it reads this as its own.
        name, given = "llvm.x86.avx512bf16.dpbf16ps.512", [total, weight, values]
    else:
        name, given = f"llvm.fma.v{LANES}f32", [weight, values, total]
    shape = ir.FunctionType(VECTOR, [one.type for one in given])
    return builder.call(cgutils.get_or_insert_function(builder.module, shape, name), given)


# Called as the intrinsics that they make in compiled code.
dots_of_four_inputs: Any = _dots(WEIGHTS, 4)
dots_of_three_inputs: Any = _dots(WEIGHTS, 3)
dots_of_two_inputs: Any = _dots(WEIGHTS, 2)
dots_of_input: Any = _dots(WEIGHTS, 1)
dots_of_pair: Any = _dots(1, 1)
