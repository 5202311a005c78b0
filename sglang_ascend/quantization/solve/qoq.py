"""QoQ's progressive groups (QServe, arXiv 2405.04532): int4 in groups that expand to int8 per
channel, so that the sums of a product stay integers."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from sglang_ascend.quantization.formats import INT4, INT8
from sglang_ascend.quantization.solve.rtn import per_block, spread
from sglang_ascend.quantization.weight import WEIGHT_ONLY, InputRule, QuantizedWeight

# Of the first step, so that the second never leaves int8: 119 + 15 / 2 < 127.
PROTECTED = 119
LEVELS = 15


def qoq(
    weight: Tensor, group_size: int, input_rule: InputRule = WEIGHT_ONLY
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """`weight` [out, in] in int4 by groups, and the int8 per channel that it expands to.

    First q8 = round(w / s0), s0 = max |row| / 119. Then of each group of q8 s1 = round((max - min)
    / 15), at least 1, z = round(-min / s1), q4 = clamp(round(q8 / s1) + z, 0, 15). The expanded
    codes are (q4 - z) s1. Both have the same values.
    """
    values, block = weight.double(), (1, group_size)
    first = values.abs().amax(1, keepdim=True) / PROTECTED
    first = torch.where(first > 0, first, 1.0).float()
    codes = (values / first.double()).round()
    shift = LEVELS + PROTECTED  # per_block takes what a cut block lacks as 0
    high = per_block(codes + shift, block, "amax") - shift
    low = shift - per_block(shift - codes, block, "amax")
    second = ((high - low) / LEVELS).round().clamp_min(1)
    zero = (-low / second).round()
    wide, offset = (spread(part, block, weight.shape) for part in (second, zero))
    fours = ((codes / wide).round() + offset).clamp(0, LEVELS)
    lowest = INT4.minimum  # int4 codes are signed: both sides move by 8
    grouped = QuantizedWeight(
        codes=INT4.encode(fours + lowest),
        scale=(second * first.double()).float(),
        zero=(zero + lowest).to(torch.int32),
        block=block,
        number_format=INT4,
        input_rule=input_rule,
    )
    expanded = QuantizedWeight(
        codes=((fours - offset) * wide).to(torch.int8),
        scale=first,
        zero=None,
        block=(1, weight.shape[1]),
        number_format=INT8,
        input_rule=input_rule,
    )
    assert grouped.scale.shape[1] == ceil(weight.shape[1] / group_size)
    return grouped, expanded
