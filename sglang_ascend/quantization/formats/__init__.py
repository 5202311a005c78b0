"""Number formats of codes and of quantized inputs: their values, and the rounding to them."""

from __future__ import annotations

import torch

from sglang_ascend.quantization.formats.base import Listed, NumberFormat
from sglang_ascend.quantization.formats.hif4 import HIF4
from sglang_ascend.quantization.formats.hif8 import HIF8
from sglang_ascend.quantization.formats.tables import MXFP4, MXFP8, MXFP8_E5M2, NF4

__all__ = ["FORMATS", "FP8_E4M3", "HIF4", "HIF8", "INT2", "INT3", "INT4", "INT8"]
__all__ += ["MXFP4", "MXFP8", "MXFP8_E5M2", "NF4", "Listed", "NumberFormat"]


def _integer(bits: int) -> NumberFormat:
    half = 1 << (bits - 1)
    return NumberFormat(f"int{bits}", bits, torch.int8, -half, half - 1)


INT2, INT3, INT4, INT8 = (_integer(bits) for bits in (2, 3, 4, 8))
FP8_E4M3 = NumberFormat("fp8_e4m3", 8, torch.float8_e4m3fn, -448.0, 448.0)
FORMATS = {
    form.name: form
    for form in (
        INT2, INT4, INT8, FP8_E4M3, INT3, HIF8, HIF4, MXFP8, MXFP8_E5M2, MXFP4, NF4,
    )
}  # fmt: skip
