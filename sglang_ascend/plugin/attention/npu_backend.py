"""SGLang's own "ascend" backend on an NPU, with the fused step's forwards on our operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.hardware_backend.npu.attention.ascend_backend import AscendAttnBackend
from sglang.srt.hardware_backend.npu.attention.mla_preprocess import is_mla_preprocess_enabled
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)
from sglang.srt.runtime_context import get_spec

from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.plugin.attention.backend import attend, build_metadata
from sglang_ascend.plugin.npu.latent_attention import must_absorb_prefill
from sglang_ascend.speculative.config import NAME

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def is_needed(runner: ModelRunner) -> bool:
    return _runs_fused_step() or must_absorb_prefill(runner.model_config)


def _runs_fused_step() -> bool:
    return get_spec().speculative_algorithm == NAME


class NPUAttentionBackend(AscendAttnBackend):
    """What the step has prepared runs on ``ops.attention``: lengths stay on the device, and a
    captured graph needs no new ones from the host. Everything else is SGLang's own."""

    def __init__(self, model_runner: ModelRunner, **kwargs: Any) -> None:
        super().__init__(model_runner, **kwargs)
        self.is_mla = model_runner.use_mla_backend
        self.absorbs_prefill = must_absorb_prefill(model_runner.model_config)
        self.step_metadata: StepMetadata | None = None
        if _runs_fused_step():
            self.needs_cpu_seq_lens = False
        if self.absorbs_prefill:
            AttentionBackendRegistry.register(
                "ascend", lambda attn, batch: AttnForwardMethod.MLA_NPU
            )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Of prefill and plain decode; a speculative step sets ``step_metadata`` itself."""
        self.step_metadata = None
        if self.absorbs_prefill and forward_batch.forward_mode.is_extend_without_speculative():
            self.step_metadata = build_metadata(forward_batch, self.req_to_token_pool.req_to_token)
            return
        super().init_forward_metadata(forward_batch)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if self.step_metadata is None:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if self.step_metadata is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _attend(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs):
        # The fused preprocess of latent attention has written the cache itself.
        save_kv_cache = save_kv_cache and not (self.is_mla and is_mla_preprocess_enabled())
        return attend(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
