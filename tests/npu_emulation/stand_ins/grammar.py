"""What a grammar allows, applied to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulation.stand_ins.kernels import custom_operator

STAND_INS = (
    (
        "`torch.ops.npu.apply_token_bitmask`",
        "`srt/constrained/xgrammar_backend.py`",
        "-inf where a token's bit is 0",
    ),
)


@custom_operator("apply_token_bitmask(Tensor(a!) logits, Tensor bitmask) -> ()")
def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """logits [rows, vocabulary]; bitmask int32 [rows, words], the first token in the lowest bit."""
    bits = bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))
