"""The ledger of hooks: what each changes in SGLang, why, and when it can go. Imports no SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_UPSTREAM = "https://github.com/sgl-project/sglang/blob/v0.5.23/python"
Kind = Literal["replace", "around", "before", "after"]


@dataclass(frozen=True)
class Hook:
    """One changed function of SGLang, or class of which ``methods`` are overridden."""

    target: str
    replacement: str
    why: str
    delete_when: str
    # Of what is replaced, as ``source.digest`` has it: of each method, for a class.
    sources: tuple[str, ...]
    kind: Kind = "replace"
    # The diff in patches/ that retires the hook, or why SGLang need not change.
    patch: str | None = None
    unpatched: str | None = None
    # Without it MTP or our platform does not serve; the others mend SGLang.
    required: bool = False
    methods: tuple[str, ...] = ()

    @property
    def definitions(self) -> Iterator[tuple[str, str]]:
        """(name, digest) of each function whose place is taken."""
        names = [f"{self.target}.{method}" for method in self.methods] or [self.target]
        return zip(names, self.sources, strict=True)

    @property
    def upstream(self) -> str:
        """The file of SGLang that holds the target."""
        module, _, owner = self.target.rpartition(".")[0].rpartition(".")
        path = module if owner[0].isupper() else f"{module}.{owner}"
        return f"{_UPSTREAM}/{path.replace('.', '/')}.py"


_OURS = "sglang_ascend.plugin"
_ALLOCATOR = "sglang.srt.hardware_backend.npu.allocator_npu.NPUPagedTokenToKVPoolAllocator"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_LOADER = "sglang.srt.model_loader.loader"
_NO_COPIES = "a process that uses a CUDA device cannot be a copy: elsewhere spawning is right"

# Wherever MTP serves.
COMMON_HOOKS = (
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        replacement=f"{_OURS}.requests.checks.refuse_unservable_request",
        why="a prompt of no tokens, a token id or a number of logprobs outside the vocabulary, "
        "logprobs from before the prompt, or ragged embeddings, end the server; an invalid "
        "stop_regex is answered with a 500; MTP refuses logit processors that are no thinking "
        "budgets",
        delete_when="core validates input_ids, the logprobs asked for, embeddings and stop_regex, "
        "and MTP serves every logit processor",
        sources=("c4fc64486860d1eb",),
        patch="0011-validate-input-ids.patch",
        kind="around",
    ),
    Hook(
        target="sglang.srt.sampling.sampling_params.SamplingParams.verify",
        replacement=f"{_OURS}.requests.checks.refuse_unservable_parameters",
        why="a stop token id outside the vocabulary beside min_new_tokens, a value of another "
        "type, a bias or temperature that float32 or a top_k that int32 does not hold, ends the "
        "server",
        delete_when="core validates types, stop_token_ids, temperature, top_k and the values of "
        "logit_bias",
        sources=("986c49ca8a7a0874",),
        patch="0012-validate-stop-token-ids.patch",
        kind="around",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
        replacement=f"{_OURS}.requests.emitted_text.settle_token_by_token",
        why="of two stops in one step, the first of the request's list wins, not of the text, and "
        "what the step emitted behind it is counted as thinking and part of a session",
        delete_when="a step of several tokens stops where its tokens one by one would",
        sources=("6be5d36482972a30",),
        patch="0018-first-stop-of-a-step.patch",
        kind="around",
    ),
    Hook(
        target="sglang.utils.find_printable_text",
        replacement=f"{_OURS}.requests.emitted_text.find_printable_text",
        why="a longer text may have a shorter printable part: a stream repeats the difference",
        delete_when="what has been streamed is never taken back",
        sources=("ed7ad1cf8441455b",),
        patch="0019-printable-stays-printable.patch",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        replacement=f"{_OURS}.requests.prompt_embeddings.pass_embeddings",
        why="a prompt of embeddings ends a server with a draft model, or not in bfloat16",
        delete_when="input_embeds go to the target alone, in its dtype",
        sources=("cd2003f2aa3305ba",),
        patch="0021-embeddings-to-the-target.patch",
        kind="after",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher",
        replacement=f"{_OURS}.requests.control_failures.answer_failures",
        why="what a request's handler raises ends the server",
        delete_when="the scheduler answers a request that failed",
        sources=("48dc90e4b962117a",),
        patch="0026-answer-failed-control-requests.patch",
        kind="after",
    ),
    Hook(
        target="sglang.srt.managers.communicator.FanOutCommunicator.__call__",
        replacement=f"{_OURS}.requests.control_failures.refuse_failed",
        why="an answer without fields cannot say that the request failed",
        delete_when="a path answers a failed control request with a 4xx",
        sources=("8f08895fad567ec1",),
        patch="0027-failed-answer-is-a-400.patch",
        kind="around",
    ),
)

# Where MTP serves on an NPU, whose own path keeps the rest.
NPU_HOOKS = (
    Hook(
        target="sglang.srt.speculative.draft_utils.DraftBackendFactory._create_ascend_prefill_backend",
        replacement=f"{_OURS}.attention.registration.create_draft_prefill",
        why="a draft of SGLang's NEXTN names its backend's class, which cannot prefill such heads",
        delete_when="a draft's prefill backend is the one that is registered",
        sources=("37e73590cc9ae7fe",),
        patch="0028-registered-draft-prefill.patch",
    ),
    Hook(
        target="sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode",
        replacement=f"{_OURS}.npu.scheduling.reserve_slots",
        why="every step copies lengths from memory that is not pinned: the stream is waited for",
        delete_when="lengths are copied from pinned memory",
        sources=("aedbb8cee2b342eb",),
        patch="0023-reserve-from-pinned-memory.patch",
        kind="around",
    ),
    Hook(
        target=f"{_ALLOCATOR}.alloc_extend",
        replacement=f"{_OURS}.npu.scheduling.count_pages_on_host",
        why="a step that gives a request a page asks the device for the number of pages, and waits",
        delete_when="it counts by the lengths on the host, which it is given",
        sources=("b6be9602aec5f446",),
        patch="0024-count-pages-on-host.patch",
        kind="around",
    ),
)

# On the CPU, which our platform serves: without an algorithm too.
CPU_HOOKS = (
    Hook(
        target="sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        replacement=f"{_OURS}.cpu.replacements.assign_req_to_token_pool",
        why="the KV reserve of a speculative step is written by a Triton kernel only",
        delete_when="core asks capabilities.supports_triton before launching it",
        sources=("08d4f7aeed29ad1e",),
        patch="0001-allocation-torch-path.patch",
        required=True,
    ),
    Hook(
        target="sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        replacement=f"{_OURS}.cpu.replacements.hold_the_reserve",
        why="with pages of one slot a request's row is shorter than what a step reserves at the "
        "context's end, which ends the server",
        delete_when="rows hold the reserve whatever the page size",
        sources=("c824be5d6bec34a9",),
        patch="0034-rows-hold-the-reserve.patch",
        kind="around",
        required=True,
    ),
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator",
        replacement=f"{_OURS}.cpu.pools.EmulationPools",
        why="backend name 'ascend' alone selects the torch_npu pools, whatever the device",
        delete_when="the branch also asks for an NPU",
        sources=("8c5434580c270858", "04e478a158bb5754"),
        patch="0004-ascend-pools-need-npu.patch",
        required=True,
        methods=("_build_ascend_mha_kv_pool", "_build_ascend_mla_kv_pool"),
    ),
    Hook(
        target="sglang.srt.layers.dp_attention.memcpy",
        replacement=f"{_OURS}.cpu.replacements.copy_rows",
        why="rows that ranks exchange under data-parallel attention are copied by a Triton kernel",
        delete_when="it asks where the rows are",
        sources=("b2fca8bd2c9cc8fe",),
        patch="0031-copy-rows-by-device.patch",
        required=True,
    ),
    Hook(
        target="sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch",
        replacement=f"{_OURS}.cpu.replacements.pad_without_pinning",
        why="counts of ranks are copied from pinned memory, which no CPU has",
        delete_when="it asks whether memory can be pinned, as init_mlp_sync_metadata does",
        sources=("ba80e79a8a6f01b9",),
        patch="0032-counts-of-ranks-unpinned.patch",
        kind="around",
        required=True,
    ),
    Hook(
        target="sglang.srt.distributed.parallel_state.GroupCoordinator._all_gather_into_tensor",
        replacement=f"{_OURS}.cpu.replacements.gather_side_by_side",
        why="with --enable-dp-lm-head, ranks that share a request's heads gather logits into a "
        "tensor of one dimension more, which gloo refuses",
        delete_when="logits are gathered into a tensor of as many dimensions as they have",
        sources=("b0c1222bc2368c9d",),
        patch="0033-gather-logits-as-rows.patch",
        kind="around",
        required=True,
    ),
    Hook(
        target="sglang.srt.managers.tp_worker.TpModelWorker",
        replacement=f"{_OURS}.cpu.plain_worker.PlainWorker",
        why="a server without speculation counts a token for penalties one step late, ignores "
        "seeds, and its packed weights must follow updates",
        delete_when="the platform names the worker of a server without speculation",
        sources=("70be725f5de21000", "60e078facd864ed4"),
        unpatched="packed weights are this package's own, seeds have their patches, and to count "
        "in time SGLang would have to move its counts from the scheduler into the forward",
        required=True,
        methods=("_init_model_runner", "forward_batch_generation"),
    ),
    Hook(
        target="sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree",
        replacement=f"{_OURS}.requests.prefix_cache.pair_with_last_token",
        why="keyed by pairs of tokens, a reply's cached prefix ends one token early",
        delete_when="the last token of a reply is part of its key",
        sources=("4cb2e35e0c4fd126",),
        patch="0020-pair-with-last-token.patch",
        kind="around",
    ),
    Hook(
        target=f"{_ENGINE}._launch_scheduler_processes",
        replacement=f"{_OURS}.cpu.process_start.fork_schedulers",
        sources=("e1022bb4010c4988",),
        kind="around",
        why="each spawned process imports SGLang again: ten of the seconds of a start",
        delete_when="core asks the platform how to start processes",
        unpatched=_NO_COPIES,
    ),
    Hook(
        target=f"{_ENGINE}._launch_detokenizer_subprocesses",
        replacement=f"{_OURS}.cpu.process_start.fork_detokenizers",
        sources=("577ddfc4d47f34e1",),
        kind="around",
        why="each spawned process imports SGLang again: ten of the seconds of a start",
        delete_when="core asks the platform how to start processes",
        unpatched=_NO_COPIES,
    ),
)

# On the CPU in every server, on an NPU where MTP serves.
QUANTIZATION_HOOKS = (
    Hook(
        target=f"{_LOADER}._get_quantization_config",
        replacement=f"{_OURS}.quantization.loading.served_config",
        why="no method of SGLang multiplies quantized weights on our platform; on an NPU they lack "
        "schemes, and the draft of a quantized checkpoint has none unless a flag is set",
        delete_when="the platform names the method of a checkpoint, for target and draft",
        sources=("2f69f0c535d000bf",),
        kind="around",
        unpatched="the platform's slot is asked by a method's name, without the folder",
    ),
    Hook(
        target=f"{_LOADER}.DefaultModelLoader._get_weights_iterator",
        replacement=f"{_OURS}.quantization.loading.weights_of",
        why="a model knows where a float weight goes, but not the tensors of every layout",
        delete_when="a quantization method may change the tensors that a model is given",
        sources=("ef5a51ba42535422",),
        kind="around",
        unpatched="layouts and their one weight are this package's own",
    ),
)

HOOKS = COMMON_HOOKS + NPU_HOOKS + CPU_HOOKS + QUANTIZATION_HOOKS
