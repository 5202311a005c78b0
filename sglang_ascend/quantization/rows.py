"""A quantized weight as rows of bytes, for loaders that only pass on, join or copy whole rows.

SGLang's models know by name which tensors make a fused projection, or the layer of a draft, and
hand every tensor of a linear to it; but each layout has tensors of its own. As rows of bytes every
weight is one tensor [out, n], whatever its layout, that arrives wherever a float weight would.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from sglang_ascend.quantization.formats import FORMATS
from sglang_ascend.quantization.weight import (
    NOT_ALIKE,
    InputKind,
    InputRule,
    QuantizedWeight,
    concatenate,
)

# Number format, input kind, input format, dtype of zeros, then whether there are a bias, a group
# index and a rotation; columns, columns of a block, groups, input columns of a scale (0: all);
# static scale and offset.
_HEADER = struct.Struct("<7Bx4i2f")
_FORMATS = tuple(FORMATS.values())
_KINDS = tuple(InputKind)
_ZEROS = (None, torch.int32, torch.float32)


def to_rows(weight: QuantizedWeight) -> Tensor:
    """uint8 [out, n]: each row holds its codes and scales, and how to read them."""
    weight = weight.refined((1, weight.block[1]))
    rule, zero = weight.input_rule, weight.zero
    if zero is not None:
        zero = zero.to(torch.float32 if zero.is_floating_point() else torch.int32)
    header = _HEADER.pack(
        _FORMATS.index(weight.number_format),
        _KINDS.index(rule.kind),
        _FORMATS.index(rule.number_format),
        _ZEROS.index(None if zero is None else zero.dtype),
        weight.bias is not None,
        weight.group_index is not None,
        rule.rotated,
        weight.shape[1],
        weight.block[1],
        weight.scale.shape[1],
        rule.group_size or 0,
        rule.scale or 0.0,
        rule.offset or 0.0,
    )
    num_rows = len(weight.codes)
    parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8).expand(num_rows, -1)]
    bias = None if weight.bias is None else weight.bias[:, None]
    index = None if weight.group_index is None else weight.group_index.expand(num_rows, -1)
    for part in (weight.codes, weight.scale, zero, bias, index):
        if part is not None:
            parts.append(part.contiguous().view(torch.uint8))
    return torch.cat(parts, dim=1)


def from_rows(rows: Tensor) -> QuantizedWeight:
    """The weight of ``rows``, which may be several weights' one behind another.

    Raises:
        ValueError: they cannot be one weight (see ``concatenate``).
    """
    headers = rows[:, : _HEADER.size]
    changes = (headers[1:] != headers[:-1]).any(dim=1).nonzero().flatten() + 1
    parts = [_read(part) for part in rows.tensor_split(changes.cpu())]
    return parts[0] if len(parts) == 1 else concatenate(parts)


def _read(rows: Tensor) -> QuantizedWeight:
    """Rows with one header."""
    header = _HEADER.unpack(bytes(rows[0, : _HEADER.size].tolist()))
    code, kind, input_format, zero, has_bias, has_index, turned = header[:7]
    columns, block, groups, size, *static = header[7:]
    position = _HEADER.size

    def take(width: int, dtype: torch.dtype) -> Tensor:
        nonlocal position
        start, position = position, position + width * dtype.itemsize
        return rows[:, start:position].contiguous().view(dtype)

    codes = take(columns, _FORMATS[code].dtype)
    scale = take(groups, torch.float32)
    zeros = take(groups, _ZEROS[zero]) if _ZEROS[zero] else None
    bias = take(1, torch.float32).flatten() if has_bias else None
    index = None
    if has_index:
        index, *others = take(columns, torch.int64).unique_consecutive(dim=0)
        if others:
            raise ValueError(NOT_ALIKE)
    is_static = _KINDS[kind] == InputKind.STATIC
    scale_of_input, offset = static if is_static else (None, None)
    rule = InputRule(
        _KINDS[kind], _FORMATS[input_format], size or None, scale_of_input, offset, bool(turned)
    )
    return QuantizedWeight(
        codes, scale, zeros, (1, block), _FORMATS[code], rule, bias=bias, group_index=index
    )
