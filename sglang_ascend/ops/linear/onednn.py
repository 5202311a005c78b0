"""On CPU: oneDNN's packed weights, through the operators that Inductor itself emits."""

from __future__ import annotations

import torch

from sglang_ascend.ops.linear.reference import PreparedWeight

# Rows for which oneDNN chooses its layout: a verify forward's, at batch 1. Any number is served.
EXPECTED_ROWS = 4


def is_available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )


def multiplies_bfloat16() -> bool:
    """oneDNN has products of bfloat16 for this CPU (on x86: from AVX-512 on)."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def accepts_weight(weight: torch.Tensor) -> bool:
    if weight.dtype == torch.bfloat16:
        return multiplies_bfloat16()
    return weight.dtype == torch.float32


def prepare_packed(weight: torch.Tensor) -> PreparedWeight:
    """Packs a second copy of ``weight``.

    The unpacked product repacks the weight in every call once there are two rows or more, so
    that a verify forward of four rows costs two of one row; packed, it costs little over one.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), EXPECTED_ROWS)
    return PreparedWeight(weight, packed)


def accepts_rows(x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None) -> bool:
    """oneDNN has no product of no rows."""
    return weight.packed is not None and x.dtype == weight.dense.dtype and x.numel() > 0


def linear_packed(
    x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight.packed, bias, "none", [], "")
