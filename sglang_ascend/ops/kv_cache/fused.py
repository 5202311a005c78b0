"""Cache writes by torch_npu's fused operators."""

from __future__ import annotations

import torch


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    # Its default is the NZ layout, which would scatter these rows all over a plain cache.
    torch.ops.npu.npu_scatter_pa_kv_cache(
        key, value, key_cache, value_cache, slots, cache_mode="Norm"
    )


def accepts_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> bool:
    """Contiguous tensors of one dtype."""
    tensors = (key, value, key_cache, value_cache)
    return all(t.is_contiguous() and t.dtype == key.dtype for t in tensors)


def write_latent(
    kv: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    eps: float,
) -> None:
    # A row is a batch of one; the rope cache comes before the latent cache.
    torch.ops.npu.npu_kv_rmsnorm_rope_cache(
        kv[:, None, None],
        weight,
        cos[:, None, None],
        sin[:, None, None],
        slots,
        rope_cache,
        latent_cache,
        epsilon=eps,
        cache_mode="PA_BNSD",
    )


def accepts_latent(
    kv: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    eps: float,
) -> bool:
    """512 latent and 64 rope columns, as DeepSeek-V2 and V3 have."""
    return len(weight) == 512 and kv.shape[-1] == 576 and slots.dtype == torch.int64
