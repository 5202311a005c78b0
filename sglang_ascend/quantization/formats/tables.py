"""Four-bit tables, and the OCP microscaling formats, whose scales are powers of two."""

from __future__ import annotations

import torch

from sglang_ascend.quantization.formats.base import Listed, NumberFormat

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MICRO_COLUMNS = 32
_MICRO = {"scale_bits": 8, "group_size": MICRO_COLUMNS, "power_of_two": True}

MXFP8 = NumberFormat("mxfp8", 8, torch.float8_e4m3fn, -448.0, 448.0, **_MICRO)
MXFP8_E5M2 = NumberFormat("mxfp8_e5m2", 8, torch.float8_e5m2, -57344.0, 57344.0, **_MICRO)
MXFP4 = Listed("mxfp4", 4, torch.uint8, -6.0, 6.0, numbers=(*_E2M1, *(-m for m in _E2M1)), **_MICRO)

# QLoRA's (arXiv 2305.14314): quantiles of the normal distribution, with 0 and both ends.
NF4 = Listed(
    "nf4", 4, torch.uint8, -1.0, 1.0,
    numbers=(
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
)  # fmt: skip
