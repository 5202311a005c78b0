"""Tensors in Numba's kernels: float32 as it is, bfloat16 (which Numba lacks) as its 16 bits.

A kernel of a few microseconds takes addresses, for an array of NumPy's costs more to make than a
decode step's row takes to compute; ``array_at`` makes arrays of them again. One that reads by
``widen`` and writes by ``narrow`` serves both dtypes; it computes in float32.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, types
from numba.extending import intrinsic, overload

# What the kernels read and write, and an element of it: its type tells a kernel the dtype.
FLOATS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
# Sums in any order and fused products, so that loops become vectors; infinities stay infinities.
FAST = {"reassoc", "contract", "nsz", "arcp"}

_LOG2_E = np.float32(1 / math.log(2))
# ln 2 in two parts: a multiple of the first by a small integer is exact.
_LN_2_HIGH, _LN_2_LOW = np.float32(0.693359375), np.float32(math.log(2) - 0.693359375)
# Added to a small number, it leaves the nearest integer in the low bits.
_TO_INTEGER = np.float32(1.5 * 2**23)
# Between these exp is a normal float32.
_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.3)
_TAYLOR = tuple(np.float32(1 / math.factorial(n)) for n in range(8))


@intrinsic
def _pointer(typing_context, address, element):
    def convert(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(address, element), convert


@numba.njit
def array_at(address, shape, element):
    """The contiguous array of ``shape`` at ``tensor.data_ptr()``, its dtype that of ``element``."""
    return carray(_pointer(address, element), shape)  # pyright: ignore[reportCallIssue]


def widen(value: Any) -> Any:
    """The float32 of an element of a float32 array, or of a bfloat16 array's bits."""


@overload(widen)
def _widen(value):
    if value == types.uint16:
        return lambda value: np.uint32(value << 16).view(np.float32)
    return lambda value: value


def narrow(value: Any, like: Any) -> Any:
    """A float32 as an element of the array that ``like`` is of; to nearest, ties to even."""


@overload(narrow)
def _narrow(value, like):
    if like != types.uint16:
        return lambda value, like: value

    def round_to_bfloat16(value, like):
        bits = np.float32(value).view(np.uint32)
        rounded = np.uint16(np.uint32(bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
        return rounded if value == value else np.uint16(0x7FC0)

    return round_to_bfloat16


@numba.njit(fastmath={"contract"}, error_model="numpy")
def exp(x):
    """e^x of a float32, to 2^-22: in straight lines, so that a loop of it becomes vectors.

    e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2. Beyond the normal numbers it stays
    at the last one; NaN is kept.
    """
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    shifted = x * _LOG2_E + _TO_INTEGER
    n = shifted - _TO_INTEGER
    r = (x - n * _LN_2_HIGH) - n * _LN_2_LOW
    series = _TAYLOR[7]
    series = series * r + _TAYLOR[6]
    series = series * r + _TAYLOR[5]
    series = series * r + _TAYLOR[4]
    series = series * r + _TAYLOR[3]
    series = series * r + _TAYLOR[2]
    series = series * r + _TAYLOR[1]
    series = series * r + _TAYLOR[0]
    power = np.uint32((np.float32(shifted).view(np.uint32) << 23) + 0x3F800000).view(np.float32)
    return series * power
