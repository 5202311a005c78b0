"""A layer's operators on CPU, one compiled loop each: PyTorch dispatches up to ten operations for
one, which at a few rows cost more than their work. Compiled code is kept on disk."""

from __future__ import annotations

import numpy as np
import torch

from sglang_ascend.ops.numba_cache import njit
from sglang_ascend.ops.numba_floats import FAST, FLOATS, array_at, exp, narrow, widen


def accepts_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    """float32 or bfloat16 throughout; contiguous, or some columns of rows that are."""
    is_part = x.dim() == 2 and x.stride(1) == 1
    return x.dtype in FLOATS and weight.dtype == x.dtype and (is_part or x.is_contiguous())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    output, width = x.new_empty(x.shape), len(weight)
    norm_rows(
        x.data_ptr(),
        x.stride(0) if x.dim() == 2 else width,
        weight.data_ptr(),
        output.data_ptr(),
        x.numel() // width,
        width,
        eps,
        FLOATS[x.dtype],
    )
    return output


def accepts_add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> bool:
    """float32 or bfloat16 throughout, contiguous."""
    return (
        x.dtype in FLOATS
        and residual.dtype == weight.dtype == x.dtype
        and x.is_contiguous()
        and residual.is_contiguous()
    )


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    output, total, width = torch.empty_like(x), torch.empty_like(x), len(weight)
    add_and_norm_rows(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        output.data_ptr(),
        total.data_ptr(),
        x.numel() // width,
        width,
        eps,
        FLOATS[x.dtype],
    )
    return output, total


def accepts_rotation(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> bool:
    """float32 or bfloat16 throughout; the heads of a row lie one behind another."""
    dim = query.shape[-1]
    return (
        query.dtype in FLOATS
        and query.dtype == key.dtype == cos_sin.dtype
        and query.stride()[1:] == key.stride()[1:] == (dim, 1)
        and positions.dtype == torch.int64
        and positions.is_contiguous()
    )


def rotate_neox(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rotated_query = torch.empty(query.shape, dtype=query.dtype)
    rotated_key = torch.empty(key.shape, dtype=key.dtype)
    num_rows, num_heads, dim = query.shape
    element = FLOATS[query.dtype]
    _rotate_neox(
        (query.data_ptr(), query.stride(0), num_heads, rotated_query.data_ptr()),
        (key.data_ptr(), key.stride(0), key.shape[1], rotated_key.data_ptr()),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[0],
        cos_sin.shape[1],
        num_rows,
        dim,
        element,
    )
    return rotated_query, rotated_key


def accepts_pairs(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> bool:
    """float32 or bfloat16, cosines of either; columns of a head lie one behind another."""
    return (
        query.dtype in FLOATS
        and query.dtype == key.dtype
        and cos_sin.dtype in FLOATS
        and query.stride(2) == key.stride(2) == 1
        and positions.dtype == torch.int64
        and positions.is_contiguous()
    )


def rotate_interleaved(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rotated = query.new_empty(query.shape), key.new_empty(key.shape)
    num_rows, num_heads, dim = query.shape
    element = FLOATS[query.dtype]
    rotate_pairs(
        (query.data_ptr(), *query.stride()[:2], num_heads, rotated[0].data_ptr()),
        (key.data_ptr(), *key.stride()[:2], key.shape[1], rotated[1].data_ptr()),
        (positions.data_ptr(), num_rows, dim),
        (cos_sin.data_ptr(), *cos_sin.shape),
        FLOATS[cos_sin.dtype],
        element,
    )
    return rotated


def accepts_rows(x: torch.Tensor) -> bool:
    """float32 or bfloat16, contiguous."""
    return x.dtype in FLOATS and x.is_contiguous()


def swiglu(x: torch.Tensor) -> torch.Tensor:
    width = x.shape[-1] // 2
    output = torch.empty(*x.shape[:-1], width, dtype=x.dtype)
    num_rows = x.numel() // (2 * width)
    gate_rows(x.data_ptr(), output.data_ptr(), num_rows, width, FLOATS[x.dtype])
    return output


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def norm_rows(x, stride, weight, output, num_rows, width, eps, element):
    x = array_at(x, (num_rows, stride), element)
    weight = array_at(weight, (width,), element)
    output = array_at(output, (num_rows, width), element)
    for row in range(num_rows):
        squares = np.float32(0.0)
        for d in range(width):
            value = widen(x[row, d])
            squares += value * value
        mean = squares / np.float32(width)
        inverse_rms = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
        for d in range(width):
            normed = widen(x[row, d]) * inverse_rms * widen(weight[d])
            output[row, d] = narrow(normed, element)


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def add_and_norm_rows(x, residual, weight, output, total, num_rows, width, eps, element):
    """The norm is taken of the sum before it is rounded."""
    x = array_at(x, (num_rows, width), element)
    residual = array_at(residual, (num_rows, width), element)
    weight = array_at(weight, (width,), element)
    output = array_at(output, (num_rows, width), element)
    total = array_at(total, (num_rows, width), element)
    exact = np.empty(width, np.float32)
    for row in range(num_rows):
        squares = np.float32(0.0)
        for d in range(width):
            value = widen(x[row, d]) + widen(residual[row, d])
            exact[d] = value
            total[row, d] = narrow(value, element)
            squares += value * value
        mean = squares / np.float32(width)
        inverse_rms = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
        for d in range(width):
            output[row, d] = narrow(exact[d] * inverse_rms * widen(weight[d]), element)


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def _rotate_neox(query, key, positions, cos_sin, num_positions, width, num_rows, dim, element):
    """query and key: (address, elements from row to row, heads, address of what they become)."""
    positions = array_at(positions, (num_rows,), np.int64(0))
    cos_sin = array_at(cos_sin, (num_positions, width), element)
    for source, stride, num_heads, target in (query, key):
        x = array_at(source, (num_rows, stride), element)
        y = array_at(target, (num_rows, num_heads, dim), element)
        for row in range(num_rows):
            heads = x[row, : num_heads * dim].reshape(num_heads, dim)
            _turn(heads, cos_sin[positions[row]], y[row])


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def rotate_pairs(query, key, sizes, angles, angle, element):
    """query and key: (address, elements from row to row and head to head, heads, address of what
    they become)."""
    positions, num_rows, dim = sizes
    positions = array_at(positions, (num_rows,), np.int64(0))
    cos_sin = array_at(angles[0], (angles[1], angles[2]), angle)
    half = angles[2] // 2
    for source, row_stride, head_stride, num_heads, target in (query, key):
        size = (num_rows - 1) * row_stride + (num_heads - 1) * head_stride + dim
        x = array_at(source, (size,), element)
        y = array_at(target, (num_rows, num_heads, dim), element)
        for row in range(num_rows):
            of_row = cos_sin[positions[row]]
            for head in range(num_heads):
                at = row * row_stride + head * head_stride
                for d in range(half):
                    cos, sin = widen(of_row[d]), widen(of_row[half + d])
                    first, second = widen(x[at + 2 * d]), widen(x[at + 2 * d + 1])
                    y[row, head, 2 * d] = narrow(first * cos - second * sin, element)
                    y[row, head, 2 * d + 1] = narrow(second * cos + first * sin, element)
                for d in range(2 * half, dim):
                    y[row, head, d] = x[at + d]


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def _turn(x, cos_sin, y):
    """The heads of one row, [heads, dim]; columns behind the cosines' width are copied."""
    num_heads, dim = x.shape
    half = len(cos_sin) // 2
    for head in range(num_heads):
        for d in range(half):
            cos, sin = widen(cos_sin[d]), widen(cos_sin[half + d])
            first, second = widen(x[head, d]), widen(x[head, half + d])
            y[head, d] = narrow(first * cos - second * sin, y[head, d])
            y[head, half + d] = narrow(second * cos + first * sin, y[head, d])
        for d in range(2 * half, dim):
            y[head, d] = x[head, d]


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def gate_rows(x, output, num_rows, width, element):
    x = array_at(x, (num_rows, 2 * width), element)
    output = array_at(output, (num_rows, width), element)
    for row in range(num_rows):
        for d in range(width):
            gate, up = widen(x[row, d]), widen(x[row, width + d])
            gated = gate / (np.float32(1.0) + exp(-gate)) * up
            output[row, d] = narrow(gated, element)
