"""Small unsigned integers in 32-bit words, the lowest bits first, as GPTQ, AWQ and
compressed-tensors store them; and pairs of 4-bit integers in bytes, as ModelSlim does."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def unpack_words(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words as int16 [0, 2**bits), `dim` grown by 32 / bits; bits is 2, 4 or 8."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    codes = (words.movedim(dim, -1).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.int16).flatten(-2).movedim(-1, dim)


def pack_words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """The inverse; the last word is filled up with zeros. int32."""
    per_word = WORD_BITS // bits
    last = codes.movedim(dim, -1).to(torch.int32)
    padded = torch.nn.functional.pad(last, (0, -last.shape[-1] % per_word))
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    words = (padded.unflatten(-1, (-1, per_word)) << shifts).sum(-1, dtype=torch.int32)
    return words.movedim(-1, dim).contiguous()


def unpack_nibbles(packed: Tensor) -> Tensor:
    """int8 [n, in] as int8 [2 n, in] in -8..7: the low nibble is the even row."""
    low, high = (packed << 4) >> 4, packed >> 4
    return torch.stack((low, high), 1).flatten(0, 1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """The inverse; the number of rows is even."""
    return (codes[0::2] & 0xF) | (codes[1::2] << 4)
