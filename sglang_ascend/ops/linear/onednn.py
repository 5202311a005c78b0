"""On CPU: oneDNN's packed weights, through the operators that Inductor itself emits."""

from __future__ import annotations

from functools import cache

import torch

from sglang_ascend.ops.linear.reference import PreparedWeight

# Rows for which oneDNN chooses its layout: a verify forward's, at batch 1. Any number is served.
EXPECTED_ROWS = 4


def is_available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )


def has_fused_products() -> bool:
    """The processor has float32 products with an addition (on x86: from AVX2 on)."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@cache
def multiplies_bfloat16() -> bool:
    """The processor has instructions that multiply bfloat16.

    Without them oneDNN takes it with AVX-512 alone too, but 64 rows take six times a float32
    product.
    """
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def accepts_weight(weight: torch.Tensor) -> bool:
    return weight.dtype in (torch.float32, torch.bfloat16)


def prepare_packed(weight: torch.Tensor) -> PreparedWeight:
    """Packs a second copy of ``weight``: in float32 where the CPU has no product of its dtype.

    The unpacked product repacks the weight in every call once there are two rows or more, so
    that a verify forward of four rows costs two of one row; packed, it costs little over one.
    Without products of bfloat16 PyTorch's own takes five to ten times a float32 one of 16 rows.
    """
    multiplied = weight.detach()
    if weight.dtype == torch.bfloat16 and not multiplies_bfloat16():
        multiplied = multiplied.float()
    packed = torch.ops.mkldnn._reorder_linear_weight(multiplied, EXPECTED_ROWS)
    return PreparedWeight(weight, packed)


def accepts_rows(x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None) -> bool:
    """oneDNN has no product of no rows. One row of bfloat16 reads less where it is not packed."""
    if weight.packed is None or x.dtype != weight.dense.dtype or x.numel() == 0:
        return False
    return x.dtype == weight.packed.dtype or x.numel() > x.shape[-1]


def linear_packed(
    x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    assert weight.packed is not None, "accepts_rows declines a weight that was not packed"
    if x.dtype == weight.packed.dtype:
        return torch.ops.mkldnn._linear_pointwise(x, weight.packed, bias, "none", [], "")
    wide_bias = None if bias is None else bias.float()
    return linear_packed(x.float(), weight, wide_bias).to(x.dtype)
