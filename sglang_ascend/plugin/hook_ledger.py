"""The ledger of hooks: what each changes in SGLang, why, and when it can go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_ascend.plugin import (
    attention_backend,
    disaggregation,
    emitted_text,
    npu_models,
    npu_scheduling,
    prefix_cache,
    prepared_weights,
    process_start,
    prompt_embeddings,
    replacements,
    request_checks,
    request_penalties,
    request_seeds,
    startup_checks,
    weight_updates,
)

_UPSTREAM = "https://github.com/sgl-project/sglang/blob/v0.5.23/python"


@dataclass(frozen=True)
class Hook:
    """One changed SGLang function. ``patch`` names the diff in patches/ that retires it, None
    where ``why`` is this package's own concern and SGLang need not change."""

    target: str
    replacement: Callable[..., Any]
    why: str
    delete_when: str
    patch: str | None = None
    kind: HookType = HookType.REPLACE

    @property
    def upstream(self) -> str:
        """The file of SGLang that holds the target."""
        module, _, owner = self.target.rpartition(".")[0].rpartition(".")
        path = module if owner[0].isupper() else f"{module}.{owner}"
        return f"{_UPSTREAM}/{path.replace('.', '/')}.py"


_ALLOCATION = "sglang.srt.mem_cache.allocation"
_ALLOCATOR = "sglang.srt.hardware_backend.npu.allocator_npu.NPUPagedTokenToKVPoolAllocator"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_GRAPH_SETUP = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
_PREFILL = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
_WEIGHT_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_SAMPLING_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_PACKED_BY_CORE = "core packs the weights of a CPU without AMX"


# On every device.
COMMON_HOOKS = (
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        replacement=request_checks.refuse_unknown_token_ids,
        why="one request with a token id outside the vocabulary ends the server",
        delete_when="core validates input_ids against the vocabulary",
        patch="0011-validate-input-ids.patch",
        kind=HookType.AROUND,
    ),
    Hook(
        target="sglang.srt.sampling.sampling_params.SamplingParams.verify",
        replacement=request_checks.refuse_unknown_stop_tokens,
        why="a stop token id outside the vocabulary, with min_new_tokens, ends the server",
        delete_when="core validates stop_token_ids against the vocabulary",
        patch="0012-validate-stop-token-ids.patch",
        kind=HookType.AROUND,
    ),
    Hook(
        target="sglang.srt.server_args.ServerArgs.resolve_once",
        replacement=startup_checks.refuse_bad_checkpoint,
        why="config.json is read, and fails with a traceback, before an algorithm is asked",
        delete_when="core asks a registered algorithm before it reads the model's config",
        patch="0013-ask-algorithm-before-config.patch",
        kind=HookType.BEFORE,
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
        replacement=emitted_text.settle_token_by_token,
        why="of two stops in one step, the first of the request's list wins, not of the text",
        delete_when="a step of several tokens stops where its tokens one by one would",
        patch="0018-first-stop-of-a-step.patch",
        kind=HookType.AROUND,
    ),
    Hook(
        target="sglang.utils.find_printable_text",
        replacement=emitted_text.find_printable_text,
        why="a longer text may have a shorter printable part: a stream repeats the difference",
        delete_when="what has been streamed is never taken back",
        patch="0019-printable-stays-printable.patch",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        replacement=prompt_embeddings.pass_embeddings,
        why="a prompt of embeddings ends a server with a draft model, or not in bfloat16",
        delete_when="input_embeds go to the target alone, in its dtype",
        patch="0021-embeddings-to-the-target.patch",
        kind=HookType.AFTER,
    ),
)

# Where this package's worker runs the step: on the CPU and on an NPU.
STEP_HOOKS = (
    Hook(
        target="sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        replacement=request_seeds.hash_on_any_device,
        why="seeded sampling imports sgl_kernel on CPU, and launches a Triton kernel elsewhere",
        delete_when="it has a PyTorch body where sgl_kernel is missing",
        patch="0015-hash-without-sgl-kernel.patch",
    ),
    Hook(
        target=f"{_SAMPLING_INFO}.from_schedule_batch",
        replacement=request_seeds.seed_rows,
        why="a request's seed is ignored unless a server flag replaces every kernel",
        delete_when="sampling_seed is honoured without --enable-deterministic-inference",
        patch="0016-seeds-without-a-flag.patch",
        kind=HookType.AFTER,
    ),
    Hook(
        target=f"{_SAMPLING_INFO}.merge_batch",
        replacement=request_seeds.seed_both_or_neither,
        why="as above, where a batch with seeds meets one without",
        delete_when="sampling_seed is honoured without --enable-deterministic-inference",
        patch="0016-seeds-without-a-flag.patch",
        kind=HookType.BEFORE,
    ),
    Hook(
        target="sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        replacement=request_seeds.draw_by_token,
        why="a seeded draw depends on the filters of other requests, and asserts on min-p; on CPU "
        "any draw sorts the vocabulary",
        delete_when="the PyTorch sampler hashes token ids under filters too, min-p included",
        patch="0017-seeded-noise-by-token-id.patch",
        kind=HookType.AROUND,
    ),
    *(
        Hook(
            target=f"{_WEIGHT_UPDATER}.{update}",
            replacement=weight_updates.follow_weight_update,
            why="the cut draft head is a copy, as are packed weights: no update reaches them",
            delete_when="core itself cuts the head of an MTP layer to a draft vocabulary",
            kind=HookType.AROUND,
        )
        for update in (
            "update_weights_from_disk",
            "load_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
        )
    ),
)

# On an NPU, where SGLang's own path keeps the rest.
NPU_HOOKS = (
    Hook(
        target="sglang.srt.speculative.draft_utils.DraftBackendFactory._create_ascend_prefill_backend",
        replacement=attention_backend.create_draft_prefill,
        why="a draft of SGLang's NEXTN names its backend's class, which cannot prefill such heads",
        delete_when="latent prefill on NPU takes keys and values of different widths",
        kind=HookType.AROUND,
    ),
    Hook(
        target="sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode",
        replacement=npu_scheduling.reserve_slots,
        why="every step copies lengths from memory that is not pinned: the stream is waited for",
        delete_when="lengths are copied from pinned memory",
        patch="0023-reserve-from-pinned-memory.patch",
        kind=HookType.AROUND,
    ),
    Hook(
        target=f"{_ALLOCATOR}.alloc_extend",
        replacement=npu_scheduling.count_pages_on_host,
        why="a step that gives a request a page asks the device for the number of pages, and waits",
        delete_when="it counts by the lengths on the host, which it is given",
        patch="0024-count-pages-on-host.patch",
        kind=HookType.AROUND,
    ),
    Hook(
        target="sglang.srt.models.mimo_mtp.MiMoMultiTokenPredictorLayer.forward",
        replacement=npu_models.mimo_mtp_forward,
        why="it assigns through a boolean mask, which waits for the device and cannot be captured",
        delete_when="position 0 is masked without asking which rows have it",
        patch="0022-mask-position-0-without-waiting.patch",
    ),
    Hook(
        target="sglang.srt.layers.sampler.multinomial_with_seed",
        replacement=request_seeds.draw_in_float32,
        why="torch_npu casts to float32 for float64: a token whose hash rounds to 1 is drawn",
        delete_when="the noise is computed so that float32 has it, where float64 is missing",
        patch="0025-seeded-noise-without-float64.patch",
    ),
    Hook(
        target=f"{_GRAPH_SETUP}.capture_decode_graph",
        replacement=npu_scheduling.leave_capture_to_the_step,
        why="the target is captured with its step, and not a second time for a runner of its own",
        delete_when="a registered algorithm can say that it captures for itself",
        kind=HookType.AROUND,
    ),
)

# Each applies on the CPU only: CUDA and Ascend keep SGLang's own kernels.
CPU_HOOKS = (
    Hook(
        target=f"{_ALLOCATION}.assign_req_to_token_pool_func",
        replacement=replacements.assign_req_to_token_pool,
        why="the KV reserve of a speculative step is written by a Triton kernel only",
        delete_when="core asks capabilities.supports_triton before launching it",
        patch="0001-allocation-torch-path.patch",
    ),
    Hook(
        target="sglang.srt.models.deepseek_v2.DeepseekV2ForCausalLM.set_embed_and_head",
        replacement=replacements.set_embed_and_head,
        why="sharing embedding and head with the NextN layer calls torch.cuda.synchronize",
        delete_when="it calls current_platform.synchronize, as mimo_mtp.py does",
        patch="0003-deepseek-platform-synchronize.patch",
    ),
    Hook(
        target=f"{_CONFIGURATOR}._build_ascend_mha_kv_pool",
        replacement=replacements.build_mha_kv_pool,
        why="backend name 'ascend' alone selects the torch_npu pool, whatever the device",
        delete_when="the branch also asks for an NPU",
        patch="0004-ascend-pools-need-npu.patch",
    ),
    Hook(
        target=f"{_CONFIGURATOR}._build_ascend_mla_kv_pool",
        replacement=replacements.build_mla_kv_pool,
        why="as above, for the latent (MLA) pool",
        delete_when="the branch also asks for an NPU",
        patch="0004-ascend-pools-need-npu.patch",
    ),
    Hook(
        target="sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree",
        replacement=prefix_cache.pair_with_last_token,
        why="keyed by pairs of tokens, a reply's cached prefix ends one token early",
        delete_when="the last token of a reply is part of its key",
        patch="0020-pair-with-last-token.patch",
        kind=HookType.AROUND,
    ),
    Hook(
        target="sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        replacement=request_penalties.count_in_plain_decode,
        why="overlapped decode counts each token for penalties one step late, MTP does not",
        delete_when="ScheduleBatch counts a token for penalties where it is known",
        kind=HookType.BEFORE,
    ),
    Hook(
        target=f"{_PREFILL}._send_kv_chunk",
        replacement=disaggregation.send_known_indices,
        why="slot numbers are copied to pinned memory and fenced with a CUDA event",
        delete_when="core leaves slot numbers that are on the CPU where they are",
        patch="0014-send-host-indices.patch",
        kind=HookType.BEFORE,
    ),
    *(
        Hook(
            target=f"sglang.srt.entrypoints.engine.Engine.{launch}",
            replacement=process_start.fork_processes,
            why="each spawned process imports SGLang again: ten of the seconds of a start",
            delete_when="core asks the platform how to start processes",
            kind=HookType.AROUND,
        )
        for launch in ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses")
    ),
    Hook(
        target="sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        replacement=prepared_weights.apply_linear,
        why="F.linear on CPU repacks the weight in every call: 4 rows cost twice 1 row",
        delete_when=_PACKED_BY_CORE,
    ),
    Hook(
        target="sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        replacement=prepared_weights.compute_lm_head,
        why="as above, for the head",
        delete_when=_PACKED_BY_CORE,
        kind=HookType.AROUND,
    ),
)
