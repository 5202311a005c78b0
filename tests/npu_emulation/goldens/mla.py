"""What precedes latent attention: projections, norms, rotation and the write into both caches."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulation.goldens import kvcache, norms, rotary
from npu_emulation.goldens.registry import UnsupportedArgumentError, golden


def projected(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.float() @ weight.float()


@golden("npu::npu_mla_prolog_v3")
def mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    cache_index: Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
) -> tuple[Tensor, Tensor, None, None, None]:
    """(q^N [..., N, Hckv], q^R [..., N, Dr]) and k^C, k^R at cache_index; no quantization.

    ROPE takes x's even elements before the odd ones and rotates halves; sines and cosines are
    repeated, not interleaved (equation 15 of the design document of CANN's MlaProlog).
    """
    if cache_mode != "PA_BSND" or cache_index is None:
        raise UnsupportedArgumentError(
            f"npu_mla_prolog_v3 with cache_mode={cache_mode!r} or without slots is not emulated."
        )
    num_heads, nope_width, latent_width = weight_uk.shape
    compressed, _ = norms.normalized(
        projected(token_x, weight_dq), rmsnorm_gamma_cq, rmsnorm_epsilon_cq
    )
    heads = projected(compressed, weight_uq_qr).unflatten(-1, (num_heads, -1))
    query = torch.einsum("...nd,ndl->...nl", heads[..., :nope_width], weight_uk.float())
    cos, sin = rope_cos.unsqueeze(-2), rope_sin.unsqueeze(-2)  # of all heads
    query_rope = rotary.interleave_rope(heads[..., nope_width:], cos, sin)
    latent_rope = projected(token_x, weight_dkv_kr)
    latent, _ = norms.normalized(
        latent_rope[..., :latent_width], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv
    )
    key_rope = rotary.interleave_rope(latent_rope[..., latent_width:], rope_cos, rope_sin)
    for cache, rows in ((kv_cache, latent), (kr_cache, key_rope)):
        kvcache.write_slots(cache, rows.to(cache.dtype), cache_index)
    return query.to(torch.bfloat16), query_rope.to(torch.bfloat16), None, None, None
