"""SGLang's AttentionBackend slot, filled from ``sglang_ascend.attention``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_ascend.attention.metadata import (
    StepMetadata,
    gqa_attention,
    mla_attention,
    slot_table,
)
from sglang_ascend.plugin.device import serves_on_cpu

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.spec_info import SpecInput


# Set on a forward's spec_info: the metadata that the step has already prepared for it.
_METADATA = "step_metadata"


def with_metadata(spec_info: SpecInput, metadata: StepMetadata) -> SpecInput:
    """``spec_info`` with what its forward's attention is told, in place of a build of its own."""
    setattr(spec_info, _METADATA, metadata)
    return spec_info


def register_attention() -> None:
    """Backend "ascend" off the NPU; on the NPU the in-tree backend of that name stays."""
    if serves_on_cpu():
        register_attention_backend("ascend")(AscendAttentionBackend)


class AscendAttentionBackend(AttentionBackend):
    """GQA and MLA over SGLang's KV pools."""

    # A speculative step brings its metadata; prefill and plain decode have host lengths anyway.
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_context_len = model_runner.model_config.context_len
        self.is_mla = model_runner.use_mla_backend
        self.forward_metadata: StepMetadata | None = None
        if self.is_mla:
            _always_absorb_mla()

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        prepared = getattr(forward_batch.spec_info, _METADATA, None)
        self.forward_metadata = prepared or self._build_metadata(forward_batch)

    def _build_metadata(self, forward_batch: ForwardBatch) -> StepMetadata | None:
        """Of prefill (ragged rows) and of plain decode (one row per request)."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return None
        kv_lens = forward_batch.seq_lens.long()
        host_kv_lens = forward_batch.seq_lens_cpu.tolist()
        ragged = not mode.is_decode()
        return StepMetadata(
            block_table=slot_table(
                self.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
                kv_lens,
                max(host_kv_lens),
            ),
            kv_lens=kv_lens,
            page_size=1,
            query_len=None if ragged else 1,
            ragged_query_lens=tuple(forward_batch.extend_seq_lens_cpu) if ragged else (),
            ragged_kv_lens=tuple(host_kv_lens) if ragged else (),
        )

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **unsupported: Any,
    ) -> torch.Tensor:
        _refuse_unsupported(layer, unsupported)
        if self.is_mla:
            return self._forward_mla(q, k, layer, forward_batch, save_kv_cache, q_rope, k_rope)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )
        output = gqa_attention(
            self.forward_metadata,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            layer.scaling,
        )
        return output.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _forward_mla(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        q_rope: torch.Tensor | None,
        k_rope: torch.Tensor | None,
    ) -> torch.Tensor:
        kv_lora_rank = layer.v_head_dim
        if save_kv_cache and k is not None:
            if k_rope is None:
                k, k_rope = k.split([kv_lora_rank, k.shape[-1] - kv_lora_rank], dim=-1)
            self.token_to_kv_pool.set_mla_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, k_rope
            )
        query = q.view(-1, layer.tp_q_head_num, q.shape[-1] if q.dim() == 3 else layer.head_dim)
        if q_rope is not None:
            query = torch.cat([query, q_rope.view(-1, layer.tp_q_head_num, q_rope.shape[-1])], -1)
        output = mla_attention(
            self.forward_metadata,
            query,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            layer.scaling,
            kv_lora_rank,
        )
        return output.reshape(-1, layer.tp_q_head_num * kv_lora_rank)


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


def _refuse_unsupported(layer: RadixAttention, extra: dict[str, Any]) -> None:
    given = [name for name, value in extra.items() if value is not None]
    if given:
        raise NotImplementedError(f"attention argument {given[0]} is not served on CPU.")
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        raise NotImplementedError("only causal self-attention is served on CPU.")
    if layer.sliding_window_size > -1 or layer.logit_cap:
        raise NotImplementedError("sliding windows and logit caps are not served on CPU.")
