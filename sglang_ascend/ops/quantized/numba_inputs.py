"""Inputs as bytes on CPU, one compiled loop over each row: what the integer products read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_ascend.ops.numba_cache import njit
from sglang_ascend.ops.numba_floats import FLOATS, array_at, widen
from sglang_ascend.ops.quantized.numba_dots import CODE, OFFSET

# Added to a number below 2^22, it leaves the nearest integer (ties to even) in the low bits.
TO_INTEGER = np.float32(1.5 * 2**23)
INTEGER_BITS = np.int32(0x4B400000)


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, width], contiguous, in a dtype that the loops read."""
    if x.dim() != 2 or not x.is_contiguous():
        x = x.reshape(-1, x.shape[-1]).contiguous()
    return x if x.dtype in FLOATS else x.float()


def places(rows: torch.Tensor) -> tuple[int, int, int, Any]:
    """Address, shape and kind of element of rows."""
    num_rows, width = rows.shape
    return rows.data_ptr(), num_rows, width, FLOATS[rows.dtype]


def scratch_of(rows: torch.Tensor) -> torch.Tensor:
    """For the scales of rows, and behind them their codes."""
    num_rows, width = rows.shape
    return torch.empty(num_rows * (4 + width), dtype=torch.uint8)


@njit(nogil=True, error_model="numpy")
def _quantize_rows(address, num_rows, width, element, code_address, scale_address):
    """The largest is looked for among the bits, in which NaN is above infinity and so is kept."""
    x = array_at(address, (num_rows, width), element)
    codes = array_at(code_address, (num_rows, width), CODE)
    scale = array_at(scale_address, (num_rows,), np.float32(0))
    for row in range(num_rows):
        largest = np.int32(0)
        for d in range(width):
            bits = np.float32(widen(x[row, d])).view(np.int32) & np.int32(0x7FFFFFFF)
            largest = max(largest, np.int32(bits))
        step = np.int32(largest).view(np.float32) / np.float32(127)
        scale[row] = step
        divisor = np.float32(1) if step == 0 else step
        for d in range(width):
            value = widen(x[row, d]) / divisor
            value = min(max(value, np.float32(-127)), np.float32(127))
            bits = np.float32(value + TO_INTEGER).view(np.int32)
            codes[row, d] = bits - INTEGER_BITS + OFFSET


@njit(nogil=True, error_model="numpy")
def _quantize_all(address, num_rows, width, element, code_address, scale_address, offset_address):
    x = array_at(address, (num_rows, width), element)
    codes = array_at(code_address, (num_rows, width), CODE)
    step = array_at(scale_address, (1,), np.float32(0))[0]
    shift = array_at(offset_address, (1,), np.float32(0))[0]
    for row in range(num_rows):
        for d in range(width):
            value = widen(x[row, d]) / step + shift
            value = min(max(value, np.float32(-128)), np.float32(127))
            bits = np.float32(value + TO_INTEGER).view(np.int32)
            codes[row, d] = bits - INTEGER_BITS + OFFSET


@njit(nogil=True, error_model="numpy")
def quantize_into(scratch, address, num_rows, width, element, scale, offset):
    """Into what ``scratch_of`` made; ``scale`` and ``offset`` are addresses, or 0 for scales of the
    rows. Returns the address of the codes."""
    codes = scratch + 4 * num_rows
    if scale:
        _quantize_all(address, num_rows, width, element, codes, scale, offset)
        array_at(scratch, (num_rows,), np.float32(0))[:] = 1
    else:
        _quantize_rows(address, num_rows, width, element, codes, scratch)
    return codes
