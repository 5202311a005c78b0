"""Experts on ranks of their own, to which rows travel by DeepEP: what of it MTP's step serves."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.environ import envs
from sglang.srt.utils.common import ceil_align

from sglang_ascend import env
from sglang_ascend.plugin.cpu.platform import DEFAULT_MAX_RUNNING_REQUESTS
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.errors import StartupRefused
from sglang_ascend.plugin.mtp.adaptive.refusals import asks_adaptive

DEEPEP = "deepep"
# Targets whose layers exchange rows, as tests/npu_emulation shows.
_SERVED = ("DeepseekV3ForCausalLM",)


def served_exchanges() -> tuple[str | None, ...]:
    """Values of ``--moe-a2a-backend`` with which the step is served."""
    return (None, "none", DEEPEP) if device_profile().keeps_ascend_path else (None, "none")


def unsupported_with_deepep(server_args: Any) -> dict[str, bool]:
    """Flags that were not seen beside DeepEP."""
    (architecture,) = model_config_of(server_args).hf_config.architectures or ("no model",)
    others = {
        # One mode prefills, by counts that the host waits for, and the other is captured.
        f"--deepep-mode {server_args.deepep_mode}": server_args.deepep_mode != "auto",
        "--deepep-dispatcher-output-dtype": server_args.deepep_dispatcher_output_dtype != "auto",
        "--deepep-config": bool(server_args.deepep_config),
        # The MTP layer's forwards are the target's, and SGLang fills in the second by the target's.
        "--speculative-moe-a2a-backend": (
            server_args.speculative_moe_a2a_backend not in (None, DEEPEP)
        ),
        "--speculative-moe-runner-backend": (
            server_args.speculative_moe_runner_backend not in (None, server_args.moe_runner_backend)
        ),
        "--tp-size 1": server_args.tp_size == 1,
        "--attn-dp-size above 1 (or --enable-dp-attention)": server_args.attn_dp_size > 1,
        "--attn-cp-size above 1": server_args.attn_cp_size > 1,
        "--dp-size above 1": server_args.dp_size > 1,
        "--moe-dense-tp-size": server_args.moe_dense_tp_size is not None,
        "--disaggregation-mode": server_args.disaggregation_mode != "null",
        "--enable-two-batch-overlap": server_args.enable_two_batch_overlap,
        "--enable-single-batch-overlap": server_args.enable_single_batch_overlap,
        "--init-expert-location": server_args.init_expert_location != "trivial",
        "--enable-eplb": server_args.enable_eplb,
        "--ep-num-redundant-experts": server_args.ep_num_redundant_experts > 0,
        "--elastic-ep-backend": server_args.elastic_ep_backend is not None,
        "--enforce-shared-experts-fusion": server_args.enforce_shared_experts_fusion,
        "--speculative-use-rejection-sampling": server_args.speculative_use_rejection_sampling,
        "--speculative-adaptive": asks_adaptive(server_args),
        env.LOSSY_ACCEPTANCE.name: bool(env.LOSSY_ACCEPTANCE.get()),
    }
    flag = f"--moe-a2a-backend {DEEPEP}"
    return {
        f"{flag} with {architecture}, whose layers were not seen to exchange rows,": (
            architecture not in _SERVED
        ),
        **{f"{flag} with {other}, untested together,": bool(on) for other, on in others.items()},
    }


def refuse_own_methods(server_args: Any) -> None:
    """Where ranks exchange rows, quantized weights were run by SGLang's own methods only: this
    package's experts are those of all ranks, in each. Raises StartupRefused."""
    if server_args.moe_a2a_backend == DEEPEP:
        flag = f"--moe-a2a-backend {DEEPEP}"
    elif server_args.attn_dp_size > 1:
        flag = "--enable-dp-attention"
    else:
        return
    is_quantized = model_config_of(server_args).quantization is not None
    if is_quantized and server_args.quantization != "modelslim":
        raise StartupRefused(
            f"{flag} is served with quantized weights by SGLang's own modelslim only on an NPU: "
            "add --quantization modelslim, or drop it."
        )


def refuse_small_buffers(server_args: Any, num_draft_tokens: int) -> None:
    """Verification has K + 1 rows for each request, and a kernel takes no more than its buffers
    hold. Raises StartupRefused."""
    variable = envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK
    most_requests = server_args.max_running_requests or DEFAULT_MAX_RUNNING_REQUESTS
    num_ranks = server_args.tp_size
    rows = ceil_align(most_requests, num_ranks) * num_draft_tokens // num_ranks
    if rows > variable.get():
        raise StartupRefused(
            f"{variable.name} is {variable.get()}, and a rank sends {rows} rows to verify K + 1 of "
            f"each of {most_requests} requests: set it to at least {rows}, or lower "
            "--max-running-requests or --speculative-num-steps."
        )
