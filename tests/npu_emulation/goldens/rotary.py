"""Rotary embeddings, and the fused RMSNorm, rotation and cache write of MLA's latent."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulation.goldens.norms import normalized
from npu_emulation.goldens.registry import UnsupportedArgumentError, golden


def rotated(x: Tensor, cos: Tensor, sin: Tensor, pairs: str) -> Tensor:
    """x cos + rot(x) sin: pairs are (i, i + D/2) in "half" and (2i, 2i + 1) in "interleave"."""
    x = x.float()
    if pairs == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return x * cos.float() + turned * sin.float()


def de_interleaved(x: Tensor) -> Tensor:
    """Even elements, then odd ones."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


@golden("npu::npu_rotary_mul")
def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    return rotated(input, r1, r2, rotary_mode).to(input.dtype)


@golden("npu::npu_interleave_rope")
def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (2i, 2i + 1); the result has the first of all pairs, then the second."""
    return rotated(de_interleaved(x), cos, sin, "half").to(x.dtype)


@golden("npu::npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """kv [B, 1, S, Dc + Dr]: the latent's first Dc normalized, the last Dr rotated, both written.

    index [B * S] are rows of the paged caches, negative ones not written. Returns the caches, the
    rotary one first, then the rows [B, 1, S, Dr] and [B, 1, S, Dc] if is_output_kv.
    """
    if cache_mode not in ("PA", "PA_BNSD"):
        raise UnsupportedArgumentError(
            f"npu_kv_rmsnorm_rope_cache with cache_mode={cache_mode!r} is not emulated."
        )
    width = gamma.numel()
    latent, _ = normalized(kv[..., :width], gamma, epsilon)
    rope = interleave_rope(kv[..., width:], cos, sin)
    slots = index.flatten().long()
    written = slots >= 0
    for cache, rows in ((k_cache, rope), (ckv_cache, latent)):
        cache.view(-1, rows.shape[-1])[slots[written]] = rows.flatten(0, -2)[written]
    return (k_cache, ckv_cache, rope, latent) if is_output_kv else (k_cache, ckv_cache, None, None)


@golden("npu::npu_mrope")
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: list[int] | None = None,
    rotary_mode: str = "half",
) -> tuple[Tensor, Tensor]:
    """query and key [tokens, heads * head_size] rotated by the cache's rows, cosines then sines, at
    positions [tokens]: as many elements of each head, from its first, as a row has."""
    if positions.dim() != 1 or (mrope_section and any(mrope_section)):
        raise UnsupportedArgumentError("npu_mrope is emulated with one row of positions.")
    cos, sin = cos_sin_cache.float()[positions.long()].unsqueeze(1).chunk(2, -1)
    if rotary_mode == "half":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    else:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)

    def turned(x: Tensor) -> Tensor:
        heads = x.float().view(x.shape[0], -1, head_size)
        front, rest = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
        return (
            torch.cat((rotated(front, cos, sin, rotary_mode), rest), -1).view(x.shape).to(x.dtype)
        )

    return turned(query), turned(key)
