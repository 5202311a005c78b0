"""Prepared weights: what the quantized products take, made once at load.

Codes of 8 bits are kept as they come, codes of 4 bits two to a byte. Every tensor may have one more
dimension in front, of groups of rows (experts).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class PreparedCodes:
    """What the prepared weights have in common. Outside of this package only the size is read.

    A body that has a form of its own keeps that in ``packed`` and ``codes`` empty: nothing is
    resident twice.
    """

    codes: torch.Tensor
    scale: torch.Tensor  # float32
    packed: Any = None
    # Of a packed form that is no tensor.
    opaque_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Resident: of every tensor that is kept."""
        values = (getattr(self, field.name) for field in fields(self))
        tensors = (value for value in values if isinstance(value, torch.Tensor))
        return self.opaque_bytes + sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True, kw_only=True)
class IntegerWeight(PreparedCodes):
    """Codes to be multiplied with int8 codes of the input.

    ``scale`` is [(groups,) out, ceil(in / group_size)]. With ``input_scale`` the input's scale is
    static, else every row of the input has its own.
    """

    bits: int
    width: int
    group_size: int
    input_scale: torch.Tensor | None = None  # float32 [1]
    input_offset: torch.Tensor | None = None  # float32 [1]
    quant_bias: torch.Tensor | None = None  # int32 [out], joins the integer sum


@dataclass(frozen=True, kw_only=True)
class WeightOnly(PreparedCodes):
    """Codes to be multiplied with floats: value = (code - zero) * scale.

    ``scale`` is [(groups,) out, number of scales]. The columns of the codes are in the order of
    their scales: run g is of starts[g]..starts[g + 1].
    """

    bits: int
    width: int
    # Columns of every run, where they are alike; 0 where they are not.
    group_size: int
    starts: torch.Tensor  # int64 [number of scales + 1]
    zero: torch.Tensor | None = None  # float32, in the shape of scale
    order: torch.Tensor | None = None  # int64 [in]: the input's column at each of the codes'


@dataclass(frozen=True, kw_only=True)
class BlockFP8Weight(PreparedCodes):
    """E4M3 codes and [(groups,) ceil(out / block[0]), ceil(in / block[1])] scales.

    The input is quantized to E4M3 by blocks of ``block[1]`` columns of a row, or stays float.
    """

    block: tuple[int, int]
    quantizes_input: bool


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """int8 [..., width] in -8..7 -> uint8 [..., half] with half = ceil(width / 2).

    Byte i holds column i below and column half + i above, each as code + 8: either half unpacks to
    neighbours.
    """
    half = -(-codes.shape[-1] // 2)
    shifted = codes.to(torch.uint8) + 8 & 15
    above = torch.nn.functional.pad(shifted[..., half:], (0, codes.shape[-1] % 2), value=8)
    return shifted[..., :half] | above << 4


def unpack_nibbles(packed: torch.Tensor, width: int) -> torch.Tensor:
    codes = torch.cat([packed & 15, packed >> 4], dim=-1)[..., :width]
    return codes.to(torch.int8) - 8


def check_codes(codes: torch.Tensor, bits: int) -> None:
    if bits not in (4, 8) or codes.dtype != torch.int8 or codes.dim() not in (2, 3):
        raise ValueError(f"codes are int8 of 4 or 8 bits, not {codes.dtype} of {bits}.")
    least = -(2 ** (bits - 1))
    has_values = codes.numel() and not codes.is_meta
    if has_values and bits < 8 and (codes.min() < least or codes.max() >= -least):
        raise ValueError(f"a code is outside of {bits} bits: {least} to {-least - 1}.")


def check_scale(scale: torch.Tensor, shape: tuple[int, ...]) -> None:
    if scale.dtype != torch.float32 or tuple(scale.shape) != shape:
        found = f"{scale.dtype} {list(scale.shape)}"
        raise ValueError(f"scales are float32 {list(shape)}, not {found}.")
