"""FlashInfer's latent attention on the tensors of ours, where FlashInfer is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

WORKSPACE_BYTES = 128 << 20
# Two kernels in bf16 round apart by two places.
TOLERANCE = 2**-6


def layer_of(
    query: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor,
    kv_len: int,
    query_len: int,
    page_size: int,
    rank: int,
    scale: float,
) -> Callable[[], torch.Tensor] | None:
    """Planned and ready to run, as SGLang's backend plans it; None where it is not installed.

    query [batch * query_len, heads, rank + rope], cache [slots, 1, rank + rope], pages int64
    [batch, pages]; all requests have ``kv_len`` keys.
    """
    if not find_spec("flashinfer"):
        return None
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    batch_size, device = len(pages), query.device

    def ends(step: int) -> torch.Tensor:
        return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * step

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace)
    wrapper.plan(
        qo_indptr=ends(query_len),
        kv_indptr=ends(pages.shape[1]),
        kv_indices=pages.flatten().int(),
        kv_len_arr=torch.full((batch_size,), kv_len, dtype=torch.int32, device=device),
        num_heads=query.shape[1],
        head_dim_ckv=rank,
        head_dim_kpe=query.shape[2] - rank,
        page_size=page_size,
        causal=True,
        sm_scale=scale,
        q_data_type=query.dtype,
        kv_data_type=cache.dtype,
    )
    latents, ropes = cache.view(-1, page_size, cache.shape[2]).split(
        [rank, query.shape[2] - rank], 2
    )
    parts = {
        "q_nope": query[..., :rank].contiguous(),
        "q_pe": query[..., rank:].contiguous(),
        "ckv_cache": latents.contiguous(),
        "kpe_cache": ropes.contiguous(),
    }
    return lambda: wrapper.run(**parts)


def agrees(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether both computed the same: a peer that did not is not a peer to time."""
    return torch.allclose(ours.float(), theirs.float(), rtol=TOLERANCE, atol=TOLERANCE)
