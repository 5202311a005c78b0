"""Vectors in Numba's kernels, where LLVM makes none of a loop, or too short ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils

# Vectors whose sums one pass makes at once.
FOUR = 4


def has_features(*names: str) -> bool:
    """Of the processor that Numba compiles for: this one, or NUMBA_CPU_FEATURES."""
    features = numba.config.CPU_FEATURES  # pyright: ignore[reportAttributeAccessIssue]
    if features is None:
        features = llvmlite.binding.get_host_cpu_features().flatten()
    return {f"+{name}" for name in names} <= set(features.split(","))


# Floats of a vector.
LANES = 16 if has_features("avx512f") else 8
VECTOR = ir.VectorType(ir.FloatType(), LANES)


def load(builder: Any, address: Any, vector: ir.VectorType) -> Any:
    """From an address that need not be aligned."""
    loaded = builder.load(builder.inttoptr(address, vector.as_pointer()))
    loaded.align = 1
    return loaded


def store(builder: Any, vector: Any, address: Any) -> None:
    """To an address that need not be aligned."""
    builder.store(vector, builder.inttoptr(address, vector.type.as_pointer())).align = 1


def load_widened(builder: Any, address: Any, vector: ir.VectorType, is_narrow: bool) -> Any:
    """As ``load``, of float32; of ``is_narrow`` ones' bits, which are bfloat16's."""
    if not is_narrow:
        return load(builder, address, vector)
    halves, words = (ir.VectorType(ir.IntType(bits), vector.count) for bits in (16, 32))
    wide = builder.zext(load(builder, address, halves), words)
    return builder.bitcast(builder.shl(wide, ir.Constant(words, [16] * vector.count)), vector)


def prefetch(builder: Any, address: Any, bytes_ahead: int, nearest: bool = True) -> None:
    """Into the nearest cache or the one behind it, to be read; an address beyond the memory does
    nothing."""
    pointer, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    shape = ir.FunctionType(ir.VoidType(), [pointer, int32, int32, int32])
    function = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0i8")
    # To read, of caches the nearest or the next, data.
    how = [ir.Constant(int32, number) for number in (0, 3 if nearest else 2, 1)]
    ahead = builder.add(address, ir.Constant(address.type, bytes_ahead))
    builder.call(function, [builder.inttoptr(ahead, pointer), *how])


def sum_of_each(builder: Any, vectors: Sequence[Any], add: Callable[[Any, Any], Any]) -> Any:
    """The sum over the lanes of one vector as a vector of one, or of FOUR vectors, one a lane."""
    lanes = vectors[0].type.count

    def shuffled(a, b, lanes):
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
        return builder.shuffle_vector(a, b, mask)

    def paired(a, b, low, high):
        """a + b over their lanes ``low`` and ``high`` of every four; b's are counted from 4 on."""
        of_fours = [
            [i % 4 + group + (lanes if i >= 4 else 0) for group in range(0, lanes, 4) for i in part]
            for part in (low, high)
        ]
        return add(*(shuffled(a, b, part) for part in of_fours))

    total = vectors[0]
    if len(vectors) == FOUR:
        a, b, c, d = vectors
        ab, cd = (paired(*pair, (0, 4, 1, 5), (2, 6, 3, 7)) for pair in ((a, b), (c, d)))
        total = paired(ab, cd, (0, 1, 4, 5), (2, 3, 6, 7))
    while total.type.count > len(vectors):
        half = total.type.count // 2
        parts = range(half), range(half, 2 * half)
        total = add(*(shuffled(total, total, [*part]) for part in parts))
    return total
