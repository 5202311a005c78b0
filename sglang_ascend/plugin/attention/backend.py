"""SGLang's AttentionBackend slot, filled from ``sglang_ascend.attention``; the backend on an NPU
attends over SGLang's KV pools by the same functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
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
    from sglang.srt.model_executor.model_runner import ModelRunner


class AscendAttentionBackend(AttentionBackend):
    """GQA and MLA over SGLang's KV pools."""

    # A speculative step brings its metadata; prefill and plain decode have host lengths anyway.
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.is_mla = model_runner.use_mla_backend
        self.step_metadata: StepMetadata | None = None
        if self.is_mla:
            _always_absorb_mla()

    def support_triton(self) -> bool:
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Of a request that makes up a batch to the size of another rank's: it sees slot 0."""
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Of prefill and plain decode; a speculative step sets ``step_metadata`` itself."""
        self.step_metadata = build_metadata(forward_batch, self.req_to_token_pool.req_to_token)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return attend(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return attend(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)


def _always_absorb_mla() -> None:
    """Latent attention reads the latent cache in every mode.

    DeepSeek picks a forward method per backend name; the name's own handler serves the NPU, and
    the fallback would send prefill to a method that expects unpacked keys in the pool.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("ascend", lambda attn, batch: AttnForwardMethod.MLA)


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
