"""The CPU as an SGLang platform: same logic as on Ascend, on any machine."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from sglang_ascend.plugin.device import multiplies_bfloat16
from sglang_ascend.plugin.errors import StartupRefused

ATTENTION_BACKEND = "ascend"
# The KV pool is touched at start; SGLang's share-of-memory rule would claim most of the host.
DEFAULT_MAX_TOTAL_TOKENS = 65_536
DEFAULT_MAX_RUNNING_REQUESTS = 48


class EmulationPlatform(CpuDeviceMixin, SRTPlatform):
    """Stands in for an NPU where there is no accelerator. No Triton, no graphs, gloo."""

    _enum = PlatformEnum.OOT
    device_name = "ascend-emulation"
    device_type = "cpu"
    capabilities = PlatformCapabilities(supports_triton=False, graph_capture=False)

    def get_device(self, device_id: int = 0) -> str:
        # The in-tree CPU mixin returns a torch.device, which argument resolution cannot split.
        return self.device_type

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        # Imported late: core resolves the platform while its own modules are still loading.
        from sglang_ascend.plugin.pools import EmulationMHAPool

        return EmulationMHAPool if kind == "mha" else None

    def apply_server_args_defaults(self, server_args: Any) -> None:
        # Imported late: `import sglang` loads this class, and a caller may be importing hooks.
        from sglang_ascend.plugin.hooks import require_hooks
        from sglang_ascend.plugin.ranks import share_machine

        require_hooks()
        if server_args.enable_deterministic_inference:
            raise StartupRefused(
                "--enable-deterministic-inference replaces kernels by Triton's, which a CPU has "
                "not: drop it, a request's seed is honoured without it."
            )
        share_machine(server_args.dp_size * server_args.tp_size * server_args.pp_size)
        # Forwards run in order here: a batch needs no second copy of its inputs to be safe.
        if not envs.SGLANG_EAGER_INPUT_NO_COPY.is_set():
            envs.SGLANG_EAGER_INPUT_NO_COPY.set(True)
        # Sending a cached prefix ahead of the prefill is fenced by a CUDA event.
        envs.SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX.set(False)
        # Core has filled in its own backend for any CPU by now; only a flag is left alone.
        if server_args._raw_input["attention_backend"] is None:
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.dtype == "auto" and not multiplies_bfloat16():
            server_args.dtype = "float32"
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
