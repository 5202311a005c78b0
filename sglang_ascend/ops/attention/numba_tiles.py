"""The two products of attention in Numba's kernels: a few rows over a few keys, in registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_ascend.ops.numba_cache import njit
from sglang_ascend.ops.numba_vectors import (
    FOUR,
    LANES,
    VECTOR,
    load,
    load_widened,
    prefetch,
    store,
    sum_of_each,
)

# Query rows of a tile: sums and what they are made of fill the registers; AVX-512 has more.
ROWS = 4 if LANES == 16 else 2
# Keys of a tile, and vectors of a value that one pass over the values sums.
KEYS = FOUR
CHUNKS = 4

BYTES = 4 * LANES
# A processor does not foresee the next page of memory, where the keys of a long text go on.
BYTES_AHEAD = 4096
FAST = ("contract", "reassoc", "nsz")


def _multiply_add(builder: Any, total: Any, a: Any, b: Any) -> None:
    """Adds a * b to what ``total`` points to."""
    product = builder.fmul(a, b, flags=FAST)
    builder.store(builder.fadd(builder.load(total), product, flags=FAST), total)


def _sums(builder: Any, rows: int, columns: int) -> dict[tuple[int, int], Any]:
    zero = ir.Constant(VECTOR, [0.0] * LANES)
    places = [(row, column) for row in range(rows) for column in range(columns)]
    return {place: cgutils.alloca_once_value(builder, zero) for place in places}


def _after(builder: Any, address: Any, stride: Any, number: int) -> Any:
    """The address of row ``number``."""
    return builder.add(address, builder.mul(stride, ir.Constant(stride.type, number)))


def _scores(num_rows: int) -> Any:
    """(queries, bytes from row to row, keys, bytes from key to key, vectors, scores, bytes from row
    to row): scores[row, key] of KEYS keys. Queries, keys and scores are addresses of float32."""

    @intrinsic
    def scores(typingctx, queries, query_stride, keys, key_stride, vectors, scores, stride):
        def codegen(context, builder, signature, arguments):
            queries, query_stride, keys, key_stride, vectors, scores, stride = arguments
            sums = _sums(builder, num_rows, KEYS)
            with cgutils.for_range(builder, vectors) as loop:
                offset = builder.mul(loop.index, ir.Constant(loop.index.type, BYTES))
                at_key, at_query = builder.add(keys, offset), builder.add(queries, offset)
                of_keys = [
                    load(builder, _after(builder, at_key, key_stride, key), VECTOR)
                    for key in range(KEYS)
                ]
                for row in range(num_rows):
                    query = load(builder, _after(builder, at_query, query_stride, row), VECTOR)
                    for key, of_key in enumerate(of_keys):
                        _multiply_add(builder, sums[row, key], query, of_key)
            for row in range(num_rows):
                of_row = [builder.load(sums[row, key]) for key in range(KEYS)]
                total = sum_of_each(builder, of_row, lambda a, b: builder.fadd(a, b, flags=FAST))
                place = _after(builder, scores, stride, row)
                at = builder.inttoptr(place, total.type.as_pointer())
                builder.store(total, at).align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), codegen

    return scores


def _values(num_rows: int, num_chunks: int) -> Any:
    """(weights, bytes from row to row, values, bytes from key to key, keys, sums, bytes from row to
    row): adds to sums[row] the weighted values' first ``num_chunks`` vectors. Weights, values and
    sums are addresses of float32."""

    @intrinsic
    def values(typingctx, weights, weight_stride, values, value_stride, keys, totals, stride):
        def codegen(context, builder, signature, arguments):
            weights, weight_stride, values, value_stride, keys, totals, stride = arguments
            sums = _sums(builder, num_rows, num_chunks)
            with cgutils.for_range(builder, keys) as loop:
                at_value = builder.add(values, builder.mul(loop.index, value_stride))
                four = ir.Constant(loop.index.type, 4)
                at_weight = builder.add(weights, builder.mul(loop.index, four))
                of_value = [
                    load(
                        builder,
                        builder.add(at_value, ir.Constant(at_value.type, BYTES * n)),
                        VECTOR,
                    )
                    for n in range(num_chunks)
                ]
                for row in range(num_rows):
                    place = _after(builder, at_weight, weight_stride, row)
                    weight = builder.load(builder.inttoptr(place, VECTOR.element.as_pointer()))
                    first = builder.insert_element(
                        ir.Constant(VECTOR, ir.Undefined), weight, ir.IntType(32)(0)
                    )
                    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
                    everywhere = builder.shuffle_vector(first, first, mask)
                    for n, chunk in enumerate(of_value):
                        _multiply_add(builder, sums[row, n], everywhere, chunk)
            for (row, n), total in sums.items():
                place = _after(builder, totals, stride, row)
                place = builder.add(place, ir.Constant(place.type, BYTES * n))
                held = load(builder, place, VECTOR)
                store(builder, builder.fadd(held, builder.load(total)), place)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), codegen

    return values


@intrinsic
def _vectors(typingctx: Any, element: Any, source: Any, vectors: Any, target: Any) -> Any:
    """(element of the source, source, vectors, target): float32 at ``target``, of as many elements
    as fill ``vectors``; both are addresses. LLVM makes slower code of a loop."""

    def codegen(context, builder, signature, arguments):
        _, source, vectors, target = arguments
        is_narrow = element == types.uint16
        with cgutils.for_range(builder, vectors) as loop:
            offset = builder.mul(loop.index, ir.Constant(loop.index.type, BYTES))
            at_source = builder.udiv(offset, ir.Constant(offset.type, 2 if is_narrow else 1))
            at_source = builder.add(source, at_source)
            prefetch(builder, at_source, BYTES_AHEAD)
            values = load_widened(builder, at_source, VECTOR, is_narrow)
            place = builder.add(target, offset)
            store(builder, values, place)
        return context.get_dummy_value()

    return types.void(element, *[types.intp] * 3), codegen


@intrinsic
def _total(typingctx: Any, source: Any, vectors: Any) -> Any:
    """(address, vectors): the sum of as many float32 as fill ``vectors``, always in one order. Of
    a loop whose order is free LLVM makes another one in each kernel that the loop is part of."""

    def codegen(context, builder, signature, arguments):
        source, vectors = arguments
        total = cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [0.0] * LANES))
        with cgutils.for_range(builder, vectors) as loop:
            offset = builder.mul(loop.index, ir.Constant(loop.index.type, BYTES))
            values = load(builder, builder.add(source, offset), VECTOR)
            builder.store(builder.fadd(builder.load(total), values), total)
        of_lanes = sum_of_each(builder, [builder.load(total)], builder.fadd)
        return builder.extract_element(of_lanes, ir.IntType(32)(0))

    return types.float32(*[types.intp] * 2), codegen


# Called as the intrinsics that they make in compiled code.
scores_of_tile: Any = _scores(ROWS)
scores_of_row: Any = _scores(1)
values_of_tile: Any = _values(ROWS, CHUNKS)
values_of_row: Any = _values(1, CHUNKS)
values_of_narrow_tile: Any = _values(ROWS, 1)
values_of_narrow_row: Any = _values(1, 1)
widen_vectors: Any = _vectors
total_of: Any = _total


@njit(error_model="numpy")
def score(queries, keys, count, scores, start):
    """scores[:, start:start + count], and what pads them to whole tiles."""
    num_rows, width = queries.shape
    row = 0
    while row < num_rows:
        is_tile = row + ROWS <= num_rows
        query = queries.ctypes.data + 4 * row * width
        at = scores.ctypes.data + 4 * (row * scores.shape[1] + start)
        stride = 4 * scores.shape[1]
        for j in range(0, count, KEYS):
            key, of_key = keys.ctypes.data + 4 * j * width, at + 4 * j
            vectors = width // LANES
            if is_tile:
                scores_of_tile(query, 4 * width, key, 4 * width, vectors, of_key, stride)
            else:
                scores_of_row(query, 4 * width, key, 4 * width, vectors, of_key, stride)
        row += ROWS if is_tile else 1


@njit(error_model="numpy")
def add_values(weights, start, values, count, sums):
    """Adds to ``sums`` the ``count`` values, by weights[:, start:]."""
    (num_rows, width), longest = sums.shape, weights.shape[1]
    row = 0
    while row < num_rows:
        is_tile = row + ROWS <= num_rows
        weight = weights.ctypes.data + 4 * (row * longest + start)
        of_row, column = sums.ctypes.data + 4 * row * width, 0
        while column < width:
            value, at = values.ctypes.data + 4 * column, of_row + 4 * column
            part = (weight, 4 * longest, value, 4 * width, count, at, 4 * width)
            if column + CHUNKS * LANES <= width:
                if is_tile:
                    values_of_tile(*part)
                else:
                    values_of_row(*part)
                column += CHUNKS * LANES
            else:
                if is_tile:
                    values_of_narrow_tile(*part)
                else:
                    values_of_narrow_row(*part)
                column += LANES
        row += ROWS if is_tile else 1
