"""What ``--speculative-algorithm MTP`` does not serve."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of

from sglang_ascend import env
from sglang_ascend.checkpoint.capabilities import EXCHANGE_ROWS
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.errors import StartupRefused, value_of
from sglang_ascend.plugin.mtp.adaptive.kept_costs import refuse_bad_costs
from sglang_ascend.plugin.mtp.adaptive.refusals import (
    asks_adaptive,
    ends_chains,
    most_looked_up,
    unsupported_with_chains,
)
from sglang_ascend.plugin.mtp.disaggregation import refuse_missing_engine, unserved_transfers
from sglang_ascend.plugin.mtp.ranks import refuse_uneven_heads
from sglang_ascend.plugin.mtp.sampling import lossy_acceptance
from sglang_ascend.plugin.npu.expert_exchange import (
    DEEPEP,
    refuse_own_methods,
    refuse_small_buffers,
    served_exchanges,
    unsupported_with_deepep,
)
from sglang_ascend.plugin.npu.latent_attention import refuse_unserved_attention
from sglang_ascend.plugin.npu.order import enable_write_after_read_barrier
from sglang_ascend.plugin.startup_checks import refuse_bad_trace_folder
from sglang_ascend.speculative.config import NAME, MTPConfig, MTPConfigError, resolve_config


def validate_server_args(server_args: Any, asked: str = NAME) -> None:
    """Refuses what the step cannot serve under the name ``asked``, before any weight is read.
    Raises StartupRefused."""
    refuse_bad_trace_folder()
    num_draft_tokens = resolved_config(server_args).num_draft_tokens
    lossy_acceptance.refuse_bad_policy(server_args)
    unsupported = _unsupported_flags(server_args)
    unsupported |= unsupported_with_chains(server_args)
    if server_args.enable_custom_logit_processor:
        unsupported |= _unsupported_with_processors(server_args)
    # SGLang has already turned --enable-dp-attention into the size.
    if server_args.attn_dp_size > 1:
        unsupported |= _unsupported_with_dp_attention(server_args)
    if device_profile().runs_step:
        unsupported |= _unsupported_by_step(server_args)
        unsupported |= unserved_transfers(server_args)
    if device_profile().keeps_ascend_path:
        unsupported |= _unsupported_on_npu(server_args)
        if server_args.moe_a2a_backend == DEEPEP:
            unsupported |= unsupported_with_deepep(server_args)
    refuse_given(unsupported, asked)
    refuse_bad_costs(server_args)
    refuse_uneven_heads(server_args)
    # SGLang looks next whether its own worker could do it, which is not the one that will.
    server_args.speculative_adaptive = False
    if device_profile().keeps_ascend_path:
        refuse_unserved_attention(server_args)
        refuse_own_methods(server_args)
        if server_args.moe_a2a_backend == DEEPEP:
            refuse_small_buffers(server_args, num_draft_tokens)
        value_of(env.TRUST_COPY_ORDER)  # else a value that is none would stop the first step
        enable_write_after_read_barrier()
    if device_profile().runs_step:
        refuse_missing_engine(server_args)


def refuse_given(unsupported: dict[str, bool], asked: str) -> None:
    """Raises StartupRefused for the first that was given."""
    for flag, given in unsupported.items():
        if given:
            raise StartupRefused(
                f"{flag} is not served with --speculative-algorithm {asked}: drop it."
            )


def resolved_config(server_args: Any) -> MTPConfig:
    """K and the rows of a verification, as the flags have them. Raises StartupRefused."""
    try:
        return resolve_config(
            server_args.speculative_num_steps,
            server_args.speculative_eagle_topk,
            server_args.speculative_num_draft_tokens,
        )
    except MTPConfigError as error:
        raise StartupRefused(str(error)) from None


def _unsupported_flags(server_args: Any) -> dict[str, bool]:
    """Flags that would change tokens or be ignored; each is refused rather than dropped."""
    return {
        "--pp-size above 1": server_args.pp_size > 1,
        "--page-size below 1": server_args.page_size is not None and server_args.page_size < 1,
        "--enable-multi-layer-eagle": bool(server_args.enable_multi_layer_eagle),
        "--speculative-token-map": server_args.speculative_token_map is not None,
        "--speculative-accept-threshold-single below 1": (
            server_args.speculative_accept_threshold_single != 1.0
        ),
        "--speculative-accept-threshold-acc below 1": (
            server_args.speculative_accept_threshold_acc != 1.0
        ),
        "--is-embedding": bool(server_args.is_embedding),
        "--enable-lora (or --lora-paths)": bool(server_args.enable_lora or server_args.lora_paths),
        "--enable-watermark": bool(server_args.enable_watermark),
        # Its grammars go back no token, as they must behind a rejected draft.
        "--grammar-backend outlines": server_args.grammar_backend == "outlines",
        # Its prefill leaves the MTP layer out.
        "--enable-pdmux": bool(server_args.enable_pdmux),
    }


def _unsupported_with_processors(server_args: Any) -> dict[str, bool]:
    """Where a request's thinking budget would not be kept on every row."""
    flag = "--enable-custom-logit-processor"
    others = {
        "--enable-mixed-chunk": server_args.enable_mixed_chunk,
        "--disaggregation-mode": server_args.disaggregation_mode != "null",
    }
    return {
        f"{flag} on this device, whose worker asks none about drafts,": (
            not device_profile().runs_step
        ),
        **_named(others, flag, "where rows are decoded without what is counted of them,"),
    }


def _unsupported_with_dp_attention(server_args: Any) -> dict[str, bool]:
    flag = "--attn-dp-size above 1 (or --enable-dp-attention)"
    model_config = model_config_of(server_args)
    (architecture,) = model_config.hf_config.architectures or ("no model",)
    ranks_of_a_request = server_args.tp_size // server_args.attn_dp_size
    own_forwards = {
        "--speculative-adaptive": asks_adaptive(server_args),
        env.LOOKUP_DRAFTS.name: bool(most_looked_up()),
        env.DRAFT_P_MIN.name: ends_chains(),
        "--speculative-use-rejection-sampling": server_args.speculative_use_rejection_sampling,
        env.LOSSY_ACCEPTANCE.name: lossy_acceptance.policy() is not None,
    }
    other_batches = {
        "--disaggregation-mode": server_args.disaggregation_mode != "null",
        "--enable-mixed-chunk": server_args.enable_mixed_chunk,
        "--enable-two-batch-overlap": server_args.enable_two_batch_overlap,
    }
    # SGLang gathers such logits in parts of several lengths, which gloo does not.
    uneven_head = {
        f"--enable-dp-lm-head and a --tp-size of {server_args.tp_size}": (
            server_args.enable_dp_lm_head and model_config.vocab_size % ranks_of_a_request
        )
    }
    other_groups = {
        "--attn-cp-size above 1": server_args.attn_cp_size > 1,
        "--dp-size above 1": server_args.dp_size > 1,
        "--ep-size above 1": server_args.ep_size > 1,
    }
    return {
        f"{flag} on this device, where no rank idles beside others,": (
            not device_profile().runs_step
        ),
        f"{flag} with {architecture}, whose layers were not seen to exchange rows,": (
            architecture not in EXCHANGE_ROWS
        ),
        **_named(own_forwards, flag, "by which a rank would choose its own forwards,"),
        **_named(other_batches, flag, "whose batches ranks were not seen to step on,"),
        **_named(uneven_head, flag, f"which does not divide {model_config.vocab_size} tokens,"),
        **_named(other_groups, flag, "whose ranks were not seen to exchange rows,"),
        **_named(_not_run_on_npu(server_args), flag, "not run on an NPU's ranks,"),
    }


def _not_run_on_npu(server_args: Any) -> dict[str, bool]:
    """Beside data-parallel attention, of what a CPU serves."""
    if not device_profile().keeps_ascend_path:
        return {}
    return {"--tp-size above --attn-dp-size": server_args.tp_size > server_args.attn_dp_size}


def _named(given: dict[str, Any], flag: str, why: str) -> dict[str, bool]:
    return {f"{flag} with {other}, {why}": bool(is_given) for other, is_given in given.items()}


def _unsupported_by_step(server_args: Any) -> dict[str, bool]:
    """SGLang's other backends take no prepared metadata, and the draft layer's is always ours."""
    backends = {
        "--attention-backend": server_args.attention_backend,
        "--prefill-attention-backend": server_args.prefill_attention_backend,
        "--decode-attention-backend": server_args.decode_attention_backend,
        "--speculative-draft-attention-backend": server_args.speculative_draft_attention_backend,
    }
    unserved = {f"{flag} {name}": name not in (None, "ascend") for flag, name in backends.items()}
    window = server_args.speculative_draft_window_size
    # It filters top-p of what top-k left, and not both of the whole distribution.
    unserved["--sampling-backend ascend"] = server_args.sampling_backend == "ascend"
    unserved["--speculative-draft-window-size"] = window is not None
    # Buffers and dispatch mode of the others are set for SGLang's own steps, not for ours.
    a2a = server_args.moe_a2a_backend
    unserved[f"--moe-a2a-backend {a2a}"] = a2a not in served_exchanges()
    # Else a rank's experts get rows that no expert of its own takes.
    split = f"--ep-size above 1 without --moe-a2a-backend {DEEPEP}"
    split = split if DEEPEP in served_exchanges() else "--ep-size above 1"
    unserved[split] = server_args.ep_size > 1 and a2a != DEEPEP
    unserved["--enable-waterfill"] = bool(server_args.enable_waterfill)  # it chooses one itself
    # Its memory is registered with CUDA.
    on_cpu = device_profile().emulates
    unserved["--enable-hierarchical-cache on a CPU"] = (
        on_cpu and server_args.enable_hierarchical_cache
    )
    # A turn leaves its last token without keys, and the next one counts on them.
    unserved["--enable-streaming-session"] = bool(server_args.enable_streaming_session)
    # Not carried from a verification to the reply.
    unserved["--enable-return-routed-experts"] = bool(server_args.enable_return_routed_experts)
    unserved["--enable-return-indexer-topk"] = bool(server_args.enable_return_indexer_topk)
    return unserved


def _unsupported_on_npu(server_args: Any) -> dict[str, bool]:
    return {
        # SGLang's prefill of latent attention takes no decode rows there.
        "--enable-mixed-chunk": bool(server_args.enable_mixed_chunk),
    }
