"""Definition of what precedes latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_ascend.ops import kv_cache, norm, rotary


class Projections(NamedTuple):
    """One layer's weights by the paper's names, all in the dtype of the hidden states.

    A matrix is [in, out]: the transpose of what a checkpoint holds. A head of ``w_uq_qr`` is
    ``nope_dim + rope_dim`` columns, the rope ones last and in pairs (2i, 2i + 1), as DeepSeek's
    checkpoints have them.
    """

    w_dq: torch.Tensor  # [hidden_size, q_lora_rank]
    q_norm: torch.Tensor  # [q_lora_rank]
    w_uq_qr: torch.Tensor  # [q_lora_rank, heads * (nope_dim + rope_dim)]
    w_uk: torch.Tensor  # [heads, nope_dim, kv_lora_rank]
    w_dkv_kr: torch.Tensor  # [hidden_size, kv_lora_rank + rope_dim]
    kv_norm: torch.Tensor  # [kv_lora_rank]


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
    """Queries for the absorbed attention, and the keys that these rows leave in the caches.

        c_q = rms_norm(x w_dq)      [q_nope | q_rope] = c_q w_uq_qr     [c_kv | k] = x w_dkv_kr
        query = q_nope w_uk         query_rope = rope(q_rope)
        latent_cache[slots] = rms_norm(c_kv)            rope_cache[slots] = rope(k)

    ``rope`` is ``rotary.rotate_pairs``: pairs (2i, 2i + 1) in, even columns before odd ones out,
    in queries and keys alike.

    Args:
        x: float [rows, hidden_size].
        projections: as ``packed`` returned them on this device.
        cos, sin: [rows, rope_dim], each half a copy of the other.
        slots: int64 [rows], page * page_size + offset; no slot twice.
        latent_cache, rope_cache: [pages, page_size, 1, kv_lora_rank] and [.., rope_dim].
        eps: of both norms.

    Returns:
        query [rows, heads, kv_lora_rank] and query_rope [rows, heads, rope_dim] in the dtype of
        ``x``. Does not synchronise.
    """
    num_heads, nope_dim, _ = projections.w_uk.shape
    compressed = norm.rms_norm(x @ projections.w_dq, projections.q_norm, eps)
    heads = (compressed @ projections.w_uq_qr).view(len(x), num_heads, -1)
    query = torch.bmm(heads[..., :nope_dim].transpose(0, 1), projections.w_uk).transpose(0, 1)
    query_rope = rotary.rotate_pairs(heads[..., nope_dim:], cos, sin)
    kv_cache.write_latent(
        x @ projections.w_dkv_kr,
        projections.kv_norm,
        cos,
        sin,
        slots,
        latent_cache,
        rope_cache,
        eps,
    )
    return query, query_rope


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix [in, out] in the storage order that the device multiplies by; the same values."""
    return matrix.contiguous()
