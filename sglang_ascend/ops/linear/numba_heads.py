"""Products of heads with matrices of their own on CPU: of a few rows they take less than PyTorch's
call for them.

Compiled code is kept on disk.
"""

from __future__ import annotations

import numpy as np
import torch

from sglang_ascend.ops.numba_cache import njit
from sglang_ascend.ops.numba_floats import FAST, FLOATS, array_at, narrow, widen

# Products up to which one thread makes them sooner than PyTorch has begun.
MOST_PRODUCTS = 1 << 20


def accepts(x: torch.Tensor, weights: torch.Tensor) -> bool:
    """float32 or bfloat16; the columns of a head one behind another; few products."""
    return (
        x.dtype in FLOATS
        and x.dtype == weights.dtype
        and x.stride(2) == 1
        and weights.is_contiguous()
        and len(x) * weights.numel() <= MOST_PRODUCTS
    )


def by_head(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    num_heads, width, out = weights.shape
    output = x.new_empty(len(x), num_heads, out)
    multiply_heads(
        (x.data_ptr(), *x.stride()[:2]),
        (weights.data_ptr(), num_heads, width, out),
        (output.data_ptr(), num_heads * out, out),
        len(x),
        FLOATS[x.dtype],
    )
    return output


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def multiply_heads(inputs, weights, outputs, num_rows, element):
    """inputs and outputs: (address, elements from row to row and from head to head)."""
    source, of_row, of_head = inputs
    address, num_heads, width, out = weights
    target, to_row, to_head = outputs
    x = array_at(source, ((num_rows - 1) * of_row + (num_heads - 1) * of_head + width,), element)
    y = array_at(target, ((num_rows - 1) * to_row + (num_heads - 1) * to_head + out,), element)
    matrices = array_at(address, (num_heads, width, out), element)
    totals = np.empty(out, np.float32)
    for head in range(num_heads):
        matrix = matrices[head]
        for row in range(num_rows):
            start, to = row * of_row + head * of_head, row * to_row + head * to_head
            totals[:] = 0
            i = 0
            while i + 4 <= width:  # so that sums are read and written once for four
                first, second = widen(x[start + i]), widen(x[start + i + 1])
                third, fourth = widen(x[start + i + 2]), widen(x[start + i + 3])
                a, b, c, d = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
                for n in range(out):
                    low = first * widen(a[n]) + second * widen(b[n])
                    totals[n] += low + (third * widen(c[n]) + fourth * widen(d[n]))
                i += 4
            while i < width:
                value, a = widen(x[start + i]), matrix[i]
                for n in range(out):
                    totals[n] += value * widen(a[n])
                i += 1
            for n in range(out):
                y[to + n] = narrow(totals[n], element)
