"""Attention of prompts: ATB's over pages, and two attentions over parts of the keys made one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npu_emulation.goldens.attention import RIGHT_CAUSAL, fused_infer_attention_score
from npu_emulation.goldens.registry import UnsupportedArgumentError, golden

ONLY_OUTPUT, WITH_LSE = 0, 1
ATB_MASK = 128  # ATB's kernel repeats this triangle along the diagonal


@golden("npu::npu_attention_update")
def attention_update(
    lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int
) -> tuple[Tensor, Tensor | None]:
    """lse [rows] and outputs [rows, D] of each part: O = sum exp(lse_i - lse) O_i. A part without
    keys has the log-sum-exp -inf."""
    parts = torch.stack(list(lse)).float()
    total = parts.logsumexp(0)
    weights = (parts - total).exp().nan_to_num(0.0).unsqueeze(-1)
    output = (weights * torch.stack(list(local_out)).float()).sum(0).to(local_out[0].dtype)
    return output, total if update_type == WITH_LSE else None


@golden("atb::_npu_flash_attention_qlens")
def flash_attention_qlens(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    context_lens: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: Tensor,
) -> None:
    """The last seq_len rows of each request, causal over its context_lens keys in pages
    [blocks, size, kv heads, D]; query and out [rows, heads * D]."""
    triangle = torch.ones(ATB_MASK, ATB_MASK, dtype=torch.bool).triu(1)
    if mask.shape != triangle.shape or not torch.equal(mask.bool(), triangle):
        raise UnsupportedArgumentError(
            f"_npu_flash_attention_qlens takes the upper triangle of {ATB_MASK} as its mask."
        )
    rows, _ = fused_infer_attention_score(
        query.view(query.shape[0], num_heads, -1),
        key_cache.flatten(2),
        value_cache.flatten(2),
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1),
        actual_seq_lengths=seq_len.cumsum(0).tolist(),
        actual_seq_lengths_kv=context_lens.tolist(),
        block_table=block_table,
        num_heads=num_heads,
        scale=scale_value,
        input_layout="TND",
        num_key_value_heads=num_kv_heads,
        sparse_mode=RIGHT_CAUSAL,
        block_size=key_cache.shape[1],
    )
    num_rows = int(seq_len.sum())
    out[:num_rows] = rows[:num_rows].flatten(1)
