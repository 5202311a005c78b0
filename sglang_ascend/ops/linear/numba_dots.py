"""Dot products of rows in Numba's kernels, summed in float32; a row is float32 or bfloat16's bits.

Where both rows are bfloat16's and the processor has AVX512-BF16, vdpbf16ps adds two products to a
sum at once; it takes what is too small for a normal number as 0. Else bfloat16 is widened.
What is in memory arrives while what was there before is multiplied: the next rows of weights are
asked for ahead, for a processor does not foresee several rows at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from sglang_ascend.ops.numba_cache import njit
from sglang_ascend.ops.numba_floats import array_at, widen
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

# Rows of weights that are multiplied at once with up to INPUTS of the input: as many sums as hide
# the latency of an addition and leave registers for operands, of 32 with AVX-512 and of 16 without.
WEIGHTS, INPUTS = 2, 8 if LANES == 16 else 6
BYTES_AHEAD = 4096
INT32 = ir.IntType(32)
HAS_PAIRS = has_features("avx512bf16")
PAIRS = ir.VectorType(INT32, LANES)


def _are_pairs(of_weight: Any, of_input: Any) -> bool:
    return HAS_PAIRS and of_weight == of_input == types.uint16


def _columns_of_vector(of_weight: Any, of_input: Any) -> Any:
    """How many columns are multiplied at once; those behind the last such are left out."""


@overload(_columns_of_vector)
def _overload_columns(of_weight, of_input):
    columns = 2 * LANES if _are_pairs(of_weight, of_input) else LANES
    return lambda of_weight, of_input: columns


def _dots(num_weights: int) -> Any:
    """(element of a weight, of an input, weights, inputs, number of these, columns, totals, floats
    from row to row): writes totals[input, weight]. Weights, inputs and totals are addresses, of
    contiguous rows.

    A sum is made in one order whatever the numbers of weights and inputs are.
    """

    @intrinsic
    def dots(typingctx, of_weight, of_input, weights, inputs, num_inputs, columns, totals, stride):
        def codegen(context, builder, signature, arguments):
            weights, inputs, num_inputs, columns, totals, stride = arguments[2:]
            weight_rows = _rows(builder, weights, of_weight, columns)
            input_rows = _rows(builder, inputs, of_input, columns)
            for count in range(1, INPUTS + 1):
                is_count = builder.icmp_signed("==", num_inputs, _number(num_inputs, count))
                with builder.if_then(is_count):
                    rows = weight_rows[:num_weights], input_rows[:count]
                    _multiply(builder, *rows, columns, totals, stride)
            return context.get_dummy_value()

        return types.void(of_weight, of_input, *[types.intp] * 6), codegen

    return dots


class _Row(NamedTuple):
    """In compiled code."""

    address: Any
    element: Any


def _number(like: Any, value: int) -> Any:
    return ir.Constant(like.type, value)


def _bytes(builder: Any, element: Any, count: Any) -> Any:
    return builder.mul(count, _number(count, element.bitwidth // 8))


def _rows(builder: Any, address: Any, element: Any, columns: Any) -> list[_Row]:
    of_row = _bytes(builder, element, columns)
    starts = [builder.mul(of_row, _number(columns, i)) for i in range(INPUTS)]
    return [_Row(builder.add(address, start), element) for start in starts]


def _multiply(
    builder: Any,
    weights: list[_Row],
    inputs: list[_Row],
    columns: Any,
    totals: Any,
    stride: Any,
) -> None:
    are_pairs = _are_pairs(weights[0].element, inputs[0].element)
    at_once = _number(columns, 2 * LANES if are_pairs else LANES)
    zero = ir.Constant(VECTOR, [0.0] * LANES)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in weights] for _ in inputs]
    with cgutils.for_range(builder, builder.sdiv(columns, at_once)) as loop:
        column = builder.mul(loop.index, at_once)
        of_weights = [_operand(builder, row, column, are_pairs, True) for row in weights]
        for row, of_input in zip(inputs, sums, strict=True):
            values = _operand(builder, row, column, are_pairs)
            for weight, held in zip(of_weights, of_input, strict=True):
                total = _add_products(builder, builder.load(held), weight, values)
                builder.store(total, held)
    for x, of_input in enumerate(sums):
        vectors = [*map(builder.load, of_input), zero, zero, zero]
        total = sum_of_each(builder, vectors[:FOUR], builder.fadd)
        mask = ir.Constant(ir.VectorType(INT32, len(weights)), [*range(len(weights))])
        total = builder.shuffle_vector(total, total, mask)
        place = builder.add(totals, builder.mul(stride, _number(stride, 4 * x)))
        at = builder.inttoptr(place, total.type.as_pointer())
        builder.store(total, at).align = 4


def _operand(
    builder: Any, row: _Row, column: Any, are_pairs: bool, asks_ahead: bool = False
) -> Any:
    """Of a row, as it is multiplied: pairs of bfloat16, or float32."""
    address = builder.add(row.address, _bytes(builder, row.element, column))
    if asks_ahead:
        prefetch(builder, address, BYTES_AHEAD)
    if are_pairs:
        return load(builder, address, PAIRS)
    return load_widened(builder, address, VECTOR, row.element == types.uint16)


def _add_products(builder: Any, total: Any, weight: Any, values: Any) -> Any:
    if weight.type == PAIRS:
        # Declared as before LLVM had a type of bfloat16; it reads this as its own.
        name, given = "llvm.x86.avx512bf16.dpbf16ps.512", [total, weight, values]
    else:
        name, given = f"llvm.fma.v{LANES}f32", [weight, values, total]
    shape = ir.FunctionType(VECTOR, [one.type for one in given])
    return builder.call(cgutils.get_or_insert_function(builder.module, shape, name), given)


# Called as the intrinsics that they make in compiled code.
_dots_of_weights: Any = _dots(WEIGHTS)
_dots_of_weight: Any = _dots(1)


@njit(error_model="numpy")
def sum_products(weights, inputs, of_weight, of_input, sums):
    """sums[input, weight], of rows of weights that a cache holds: (address, bytes from row to row,
    number of rows). A sum is made in one order whatever the rows beside it are."""
    if len(inputs) == 0:  # of an expert that no row goes to
        return
    _sum_vectors(weights, inputs, of_weight, of_input, sums)
    _sum_rest(weights, inputs, of_weight, of_input, sums)


@njit(error_model="numpy")
def _sum_vectors(weights, inputs, of_weight, of_input, sums):
    """Of the columns that fill vectors."""
    first, of_row, count = weights
    (num_rows, width), stride = inputs.shape, sums.shape[1]
    at_once = -(-num_rows // -(-num_rows // INPUTS))  # 8 rows are 4 and 4: 6 and 2 take longer
    for row in range(0, num_rows, at_once):
        num_inputs = min(at_once, num_rows - row)
        x = inputs.ctypes.data + row * width * inputs.itemsize
        n, address = 0, first
        while n < count:
            num_weights = WEIGHTS if n + WEIGHTS <= count else 1
            at = sums.ctypes.data + 4 * (row * stride + n)
            if num_weights == WEIGHTS:
                _dots_of_weights(of_weight, of_input, address, x, num_inputs, width, at, stride)
            else:
                _dots_of_weight(of_weight, of_input, address, x, num_inputs, width, at, stride)
            address += num_weights * of_row
            n += num_weights


@njit(error_model="numpy")
def _sum_rest(weights, inputs, of_weight, of_input, sums):
    """Adds the columns behind the vectors."""
    address, _, count = weights
    (num_rows, width), columns = inputs.shape, _columns_of_vector(of_weight, of_input)
    start = width // columns * columns
    if start == width:
        return
    matrix = array_at(address, (count, width), of_weight)
    for row in range(num_rows):
        for w in range(count):
            total = sums[row, w]
            for i in range(start, width):
                total += widen(matrix[w, i]) * widen(inputs[row, i])
            sums[row, w] = total
