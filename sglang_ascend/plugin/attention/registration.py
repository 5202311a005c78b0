"""Which class fills SGLang's AttentionBackend slot "ascend" on each device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_ascend.plugin.attention.backend import AscendAttentionBackend
from sglang_ascend.plugin.device import device_profile

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def register_attention() -> None:
    """Backend "ascend"; on CUDA SGLang's own backends serve."""
    if device_profile().emulates:
        register_attention_backend("ascend")(AscendAttentionBackend)
    elif device_profile().keeps_ascend_path:
        in_tree = ATTENTION_BACKENDS["ascend"]
        register_attention_backend("ascend")(partial(create_on_npu, in_tree))


def create_on_npu(in_tree: Callable[[ModelRunner], AttentionBackend], runner: ModelRunner) -> Any:
    """SGLang's own backend, but where the fused step or the model's shape asks for ours."""
    from sglang_ascend.plugin.attention.npu_backend import NPUAttentionBackend, is_needed

    return NPUAttentionBackend(runner) if is_needed(runner) else in_tree(runner)


def create_draft_prefill(self: Any) -> tuple[str, Any]:
    """For ``DraftBackendFactory._create_ascend_prefill_backend``, which names SGLang's class."""
    return "ascend", ATTENTION_BACKENDS["ascend"](self.draft_model_runner)
