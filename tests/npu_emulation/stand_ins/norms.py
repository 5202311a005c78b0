"""Fused norms of `sgl_kernel_npu`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from npu_emulation.goldens.norms import normalized
from npu_emulation.stand_ins.kernels import kernel, launch, new_result

STAND_INS = (
    (
        "`sgl_kernel_npu.norm.fused_split_qk_norm.fused_split_qk_norm`",
        "`srt/hardware_backend/npu/modules/deepseek_v2_attention_mla_npu.py`",
        "the two norms of the three parts",
    ),
)


@kernel("norm.fused_split_qk_norm.fused_split_qk_norm")
def fused_split_qk_norm(
    x: Tensor,
    q_norm: Any,
    kv_norm: Any,
    q_rank: int,
    kv_rank: int,
    rope_width: int,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, q_rank + kv_rank + rope_width]: normalized query and latent, rotary part."""
    results = (
        new_result(x, x.shape[0], q_rank),
        new_result(x, x.shape[0], 1, kv_rank),
        new_result(x, x.shape[0], 1, rope_width),
    )

    def compute(x: Tensor, q_gamma: Tensor, kv_gamma: Tensor, *results: Tensor) -> None:
        query, latent, rope = x.split([q_rank, kv_rank, rope_width], -1)
        results[0].copy_(normalized(query, q_gamma, eps)[0])
        results[1].copy_(normalized(latent, kv_gamma, eps)[0].unsqueeze(1))
        results[2].copy_(rope.unsqueeze(1))

    launch("fused_split_qk_norm", compute, x, q_norm.weight, kv_norm.weight, *results)
    return results
