"""The attention of one layer over SGLang's KV pools, by ``sglang_ascend.attention``; every backend
of this package attends through it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_ascend.attention.metadata import (
    StepMetadata,
    gqa_attention,
    mla_attention,
    slot_table,
)

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.spec_info import SpecInput


# Set on a forward's spec_info: the metadata that the step has already prepared for it.
_METADATA = "step_metadata"


def with_metadata(spec_info: SpecInput, metadata: StepMetadata) -> SpecInput:
    """``spec_info`` with what its forward's attention is told, in place of a build of its own."""
    setattr(spec_info, _METADATA, metadata)
    return spec_info


def prepared_metadata(forward_batch: ForwardBatch) -> StepMetadata | None:
    """What ``with_metadata`` gave this forward, None for one that the step did not prepare."""
    return getattr(forward_batch.spec_info, _METADATA, None)


def build_metadata(forward_batch: ForwardBatch, req_to_token: torch.Tensor) -> StepMetadata | None:
    """Of prefill (ragged rows) and of plain decode (one row per request)."""
    mode = forward_batch.forward_mode
    if mode.is_idle():
        return None
    kv_lens = forward_batch.seq_lens.long()
    host_kv_lens = forward_batch.seq_lens_cpu.tolist()
    ragged = not mode.is_decode()
    return StepMetadata(
        block_table=slot_table(
            req_to_token, forward_batch.req_pool_indices, kv_lens, max(host_kv_lens)
        ),
        kv_lens=kv_lens,
        page_size=1,
        query_len=None if ragged else 1,
        ragged_query_lens=tuple(forward_batch.extend_seq_lens_cpu) if ragged else (),
        ragged_kv_lens=tuple(host_kv_lens) if ragged else (),
    )


def attend(
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    save_kv_cache: bool,
    **kwargs: Any,
) -> torch.Tensor:
    """A backend's forward of one layer, with the backend's ``step_metadata`` and pool."""
    function = attend_latent if backend.is_mla else attend_grouped
    loc = KVWriteLoc(forward_batch.out_cache_loc, None) if save_kv_cache else None
    pool = backend.token_to_kv_pool
    return function(backend.step_metadata, pool, layer, q, k, v, loc, **kwargs)


def attend_grouped(
    metadata: StepMetadata,
    pool: Any,
    layer: RadixAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    write_loc: KVWriteLoc | None,
    **unsupported: Any,
) -> torch.Tensor:
    """Writes the rows' keys and values where ``write_loc`` says, and attends (GQA).

    ``q`` [rows, heads * head_dim] -> the same shape.
    """
    _refuse_unsupported(layer, unsupported)
    if write_loc is not None and k is not None:
        pool.set_kv_buffer(layer, write_loc, k, v)
    output = gqa_attention(
        metadata,
        q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
        _slots(pool.get_key_buffer(layer.layer_id)),
        _slots(pool.get_value_buffer(layer.layer_id)),
        layer.scaling,
    )
    return output.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)


def attend_latent(
    metadata: StepMetadata,
    pool: Any,
    layer: RadixAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    write_loc: KVWriteLoc | None,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    **unsupported: Any,
) -> torch.Tensor:
    """As ``attend_grouped`` on the latent cache: absorbed queries, [rows, heads * kv_lora_rank]."""
    _refuse_unsupported(layer, unsupported)
    kv_lora_rank = layer.v_head_dim
    latent_cache = _slots(pool.get_key_buffer(layer.layer_id))
    # Ascend's pool keeps the rope part beside the latent one, SGLang's others behind it.
    apart = latent_cache.shape[-1] == kv_lora_rank
    if write_loc is not None and k is not None:
        if k_rope is None:
            k, k_rope = k.split([kv_lora_rank, k.shape[-1] - kv_lora_rank], dim=-1)
        write = pool.set_kv_buffer if apart else pool.set_mla_kv_buffer
        write(layer, write_loc, k, k_rope)
    heads, width = layer.tp_q_head_num, q.shape[-1] if q.dim() == 3 else layer.head_dim
    if q_rope is not None:
        q_rope = q_rope.reshape(-1, heads, q_rope.shape[-1]).contiguous()
    output = mla_attention(
        metadata,
        q.reshape(-1, heads, width).contiguous(),
        latent_cache,
        layer.scaling,
        kv_lora_rank,
        _slots(pool.get_value_buffer(layer.layer_id)) if apart else None,
        q_rope,
    )
    return output.reshape(-1, layer.tp_q_head_num * kv_lora_rank)


def _slots(cache: torch.Tensor) -> torch.Tensor:
    """A layer's cache, [slots, heads, dim] or with pages in front, as the former."""
    return cache.view(-1, *cache.shape[-2:])


def _refuse_unsupported(layer: RadixAttention, extra: dict[str, Any]) -> None:
    given = [name for name, value in extra.items() if value is not None]
    if given:
        raise NotImplementedError(f"attention argument {given[0]} is not served here.")
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        raise NotImplementedError("only causal self-attention is served here.")
    if layer.sliding_window_size > -1 or layer.logit_cap:
        raise NotImplementedError("sliding windows and logit caps are not served here.")
