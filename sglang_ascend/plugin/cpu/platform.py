"""The CPU as an SGLang platform: same logic as on Ascend, on any machine."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from sglang_ascend.ops.linear.onednn import multiplies_bfloat16
from sglang_ascend.plugin.errors import StartupRefused

ATTENTION_BACKEND = "ascend"
# The KV pool is touched at start; SGLang's share-of-memory rule would claim most of the host.
DEFAULT_MAX_TOTAL_TOKENS = 65_536
DEFAULT_MAX_RUNNING_REQUESTS = 48

logger = logging.getLogger(__name__)


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

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        # Imported late: core resolves the platform while its own modules are still loading.
        from sglang_ascend.plugin.cpu.pools import EmulationMHAPool

        return EmulationMHAPool if kind == "mha" else None

    def init_backend(self) -> None:
        # Imported late, as above.
        from sglang_ascend.plugin.cpu.preparation import register_layers
        from sglang_ascend.plugin.cpu.replacements import register_collectives

        register_collectives()
        register_layers(self.get_dispatch_key_name())

    def post_load_model(self, model: torch.nn.Module) -> None:
        from sglang_ascend.plugin.cpu.experts import flatten_router_biases
        from sglang_ascend.plugin.cpu.latent_drafts import NextNDrafts
        from sglang_ascend.plugin.cpu.layers import MimoDrafts
        from sglang_ascend.plugin.cpu.preparation import prepare_layers

        flatten_router_biases(model)
        prepare_layers(model)
        for drafts in (MimoDrafts, NextNDrafts):
            if drafts.serves(model):
                model.forward = drafts(model)
        log_dtype(next(model.parameters()).dtype)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        # Imported late, as above.
        from sglang_ascend.plugin.mtp.ranks import share_machine

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
        # SGLang's choice beside keys by head, host_pool, registers its memory with CUDA.
        backup = server_args.disaggregation_decode_retraction_backup
        server_args.disaggregation_decode_retraction_backup = backup or "cpu_tensor"
        # An idle scheduler polls without a pause, on a core that other programs could have. Not
        # with data-parallel attention: each rank would sleep on while another has a request.
        server_args.sleep_on_idle |= server_args.attn_dp_size == 1


@cache
def log_dtype(dtype: torch.dtype) -> None:
    """Says once which dtype serves, and whether it is the one that serves fastest here."""
    logger.info("%s", dtype_sentence(dtype, multiplies_bfloat16()))


def dtype_sentence(dtype: torch.dtype, cpu_multiplies_bfloat16: bool) -> str:
    fastest = torch.bfloat16 if cpu_multiplies_bfloat16 else torch.float32
    has = "has" if cpu_multiplies_bfloat16 else "has not"
    name = str(dtype).removeprefix("torch.")
    if dtype == fastest:
        return f"Serving in {name}, the fastest here: this CPU {has} bf16 instructions."
    fastest_name = str(fastest).removeprefix("torch.")
    return (
        f"Serving in {name}; {fastest_name} is faster here, since this CPU {has} bf16 "
        f"instructions: --dtype {fastest_name}."
    )
