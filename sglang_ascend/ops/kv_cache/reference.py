"""Definitions of what writes a forward's rows into the paged cache."""

from __future__ import annotations

import torch

from sglang_ascend.ops.norm.reference import rms_norm
from sglang_ascend.ops.rotary.reference import rotate_pairs


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Writes keys and values into their slots, in place.

    Args:
        key, value: [rows, heads, dim], in the dtype of the caches.
        key_cache, value_cache: [pages, page_size, heads, dim], contiguous.
        slots: int [rows], page * page_size + offset; no slot twice.

    Does not synchronise.
    """
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slots.long()] = rows


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
    """Norms the latent part, rotates the rope part, and writes both into their slots, in place.

    What a token leaves behind in latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1):
    c = rms_norm(kv[:kv_lora_rank]) and the one rope key that all heads share.

    Args:
        kv: float [rows, kv_lora_rank + rope_dim].
        weight: [kv_lora_rank], of the norm.
        cos, sin: [rows, rope_dim], as in ``rotary.rotate_pairs``.
        slots: int64 [rows]; no slot twice.
        latent_cache, rope_cache: [pages, page_size, 1, kv_lora_rank] and [.., rope_dim].

    Does not synchronise.
    """
    latent, rope = kv.split([len(weight), kv.shape[-1] - len(weight)], dim=-1)
    latent = rms_norm(latent, weight, eps)
    rope = rotate_pairs(rope[:, None], cos, sin)
    write_kv(latent[:, None], rope, latent_cache, rope_cache, slots)
