"""SGLang's AttentionBackend slot, filled from ``sglang_ascend.attention``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.plugin.device import serves_on_cpu, serves_on_npu
from sglang_ascend.plugin.pool_attention import attend, build_metadata, prepared_metadata

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def register_attention() -> None:
    """Backend "ascend"; on CUDA SGLang's own backends serve."""
    if serves_on_cpu():
        register_attention_backend("ascend")(AscendAttentionBackend)
    elif serves_on_npu():
        in_tree = ATTENTION_BACKENDS["ascend"]
        register_attention_backend("ascend")(partial(create_on_npu, in_tree))


def create_on_npu(in_tree: Callable[[ModelRunner], AttentionBackend], runner: ModelRunner) -> Any:
    """SGLang's own backend, but where the fused step or the model's shape asks for ours."""
    from sglang_ascend.plugin.npu_attention_backend import NPUAttentionBackend, is_needed

    return NPUAttentionBackend(runner) if is_needed(runner) else in_tree(runner)


def create_draft_prefill(original: Callable[[Any], tuple[str, Any]], self: Any) -> tuple[str, Any]:
    """Around ``DraftBackendFactory._create_ascend_prefill_backend``, which names SGLang's class."""
    from sglang_ascend.plugin.npu_attention_backend import NPUAttentionBackend, must_absorb_prefill

    if not must_absorb_prefill(self.draft_model_runner):
        return original(self)
    return "ascend", NPUAttentionBackend(self.draft_model_runner)


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
        self.step_metadata: StepMetadata | None = None
        if self.is_mla:
            _always_absorb_mla()

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        prepared = prepared_metadata(forward_batch)
        self.step_metadata = prepared or build_metadata(
            forward_batch, self.req_to_token_pool.req_to_token
        )

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
