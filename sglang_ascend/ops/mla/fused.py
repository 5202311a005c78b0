"""The prolog by torch_npu's one operator, in bfloat16 and for the sizes that it is written for.

How it pairs columns its documentation leaves open; CANN's of MlaProlog (equation 15) does not."""

from __future__ import annotations

import torch

from sglang_ascend.ops.mla.reference import Projections

FRACTAL_NZ = 29

HIDDEN_SIZES = frozenset({6144, 7168, 7680})
Q_LORA_RANK, KV_LORA_RANK, NOPE_DIM, ROPE_DIM = 1536, 512, 128, 64
NUM_HEADS = frozenset({1, 2, 4, 8, 16, 32, 64, 128})
PAGE_SIZES = frozenset({16, 128})


def prolog(
    x: torch.Tensor,
    projections: Projections,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Sines come before cosines.
    query, query_rope, *_ = torch.ops.npu.npu_mla_prolog_v3(
        x,
        projections.w_dq,
        projections.w_uq_qr,
        projections.w_uk,
        projections.w_dkv_kr,
        projections.q_norm,
        projections.kv_norm,
        sin,
        cos,
        latent_cache,
        rope_cache,
        cache_index=slots,
        rmsnorm_epsilon_cq=eps,
        rmsnorm_epsilon_ckv=eps,
        cache_mode="PA_BSND",
    )
    return query, query_rope


def accepts(
    x: torch.Tensor,
    projections: Projections,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    *,
    eps: float,
) -> bool:
    """DeepSeek-V3's sizes but for the heads, in bfloat16, with pages of 16 or 128 tokens."""
    num_heads, *widths = projections.w_uk.shape
    tensors = (x, *projections, cos, sin, latent_cache, rope_cache)
    return (
        all(tensor.dtype == torch.bfloat16 for tensor in tensors)
        and slots.dtype == torch.int64
        and x.shape[1] in HIDDEN_SIZES
        and projections.w_dq.shape[1] == Q_LORA_RANK
        and num_heads in NUM_HEADS
        and widths == [NOPE_DIM, KV_LORA_RANK]
        and rope_cache.shape[-1] == ROPE_DIM
        and latent_cache.shape[1] in PAGE_SIZES
        and latent_cache.is_contiguous()
        and rope_cache.is_contiguous()
    )


def pack(matrix: torch.Tensor) -> torch.Tensor:
    # Without torch.npu.config.allow_internal_format, which SGLang turns on, nothing is cast.
    return torch.ops.npu.npu_format_cast(matrix.contiguous(), FRACTAL_NZ)
