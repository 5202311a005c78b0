"""SGLang's speculative worker slot: a ScheduleBatch in, one speculative step, a result out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_device, get_schedule, get_spec
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import get_plan_stream

from sglang_ascend.plugin import lossy_acceptance
from sglang_ascend.plugin.device import serves_on_npu
from sglang_ascend.plugin.lossy_acceptance import RelaxedInThinking
from sglang_ascend.plugin.mtp_draft import MTPDraftWorker
from sglang_ascend.plugin.mtp_forwards import BatchModels
from sglang_ascend.plugin.observability import make_timeline, make_watchdog
from sglang_ascend.plugin.request_penalties import RequestPenalties
from sglang_ascend.plugin.step_graphs import ReplayedBatch, StepGraphs, captured_steps
from sglang_ascend.sampling.lossy import Relaxed, Threshold
from sglang_ascend.speculative.step import (
    Requests,
    StepConstants,
    StepResult,
    replayed_step,
    speculative_step,
)


class MTPWorker(EAGLEWorkerV2):
    """Prefill as SGLang's EAGLE worker has it; decode is ``speculative.step.speculative_step``."""

    draft_worker_cls = MTPDraftWorker
    step_graphs: StepGraphs | None = None

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: Any
    ) -> None:
        self.lossy = lossy_acceptance.policy()
        if self.lossy is not None:
            lossy_acceptance.warn(self.lossy)
        self._init_as_eagle(server_args, gpu_id, nccl_port, target_worker)
        self._draft_worker.draws_drafts = self.draws_drafts
        self.acceptance_watchdog = make_watchdog(self.speculative_num_steps)
        self.step_timeline = make_timeline()

    def _init_as_eagle(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: Any
    ) -> None:
        """EAGLEWorkerV2.__init__, which names its own draft worker class (patch 0009)."""
        BaseSpecWorker.__init__(self)
        self.server_args = server_args
        self.gpu_id = gpu_id
        self.device = get_device().device
        self.page_size = get_schedule().page_size
        self.topk = get_spec().speculative_eagle_topk
        self.speculative_num_steps = get_spec().speculative_num_steps
        self.speculative_num_draft_tokens = get_spec().speculative_num_draft_tokens
        self.speculative_algorithm = SpeculativeAlgorithm.from_string(
            get_spec().speculative_algorithm
        )
        self.enable_dp_spec_prefill_coordination = False
        self.adaptive_controller = None
        self.plan_stream, self.plan_stream_ctx = get_plan_stream(self.device)
        self._target_worker = target_worker
        self._draft_worker = self.draft_worker_cls(server_args, gpu_id, nccl_port, target_worker)

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish, pp_proxy_tensors)
        models = BatchModels(self, batch, on_publish, grammar_barrier)
        timeline = self.step_timeline
        result, replayed = self._step(batch, models)
        if batch.return_logprob:
            compute_spec_logprobs(
                batch,
                models.logits_output,
                result.sampled.view(-1),
                chain_stride=self.speculative_num_draft_tokens,
            )
        batch_result = self._batch_result(result, models, replayed)
        if timeline is not None:
            timeline.finish(len(batch.reqs))
        return batch_result

    def _step(self, batch: ScheduleBatch, models: BatchModels) -> tuple[StepResult, bool]:
        """(the step's result, whether a graph was replayed for it)."""
        candidates, requests = batch.spec_info.topk_index, _requests_of(batch)
        graphs, begin = self.step_graphs, lambda models: models
        if self.step_timeline is not None:
            begin = self.step_timeline.begin
        # Drafts that are drawn need the batch's own sampling parameters within the captured part.
        if graphs is not None and not models.sampling.draws_drafts:
            graph = graphs.graph_for(len(candidates))
            if graph is not None:
                replayed = ReplayedBatch(graph, graphs.buffers, models)
                return replayed_step(candidates, requests, begin(replayed)), True
        step = speculative_step(candidates, requests, self.step_constants, begin(models))
        return step, False

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        if serves_on_npu():
            self.step_graphs = captured_steps(self)

    def _prefill(self, batch: ScheduleBatch, *args: Any) -> GenerationBatchResult:
        """As SGLang's, with the start of what is counted of each request's output."""
        self.penalties.prefill(batch)
        if self.relaxed is not None:
            self.relaxed.prefill(batch)
        return self._forward_prefill_batch(batch, *args)

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """The scheduler has the accepted drafts of a step on the host."""
        if self.acceptance_watchdog is not None:
            self.acceptance_watchdog.record(num_correct_drafts_per_req)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        if self.acceptance_watchdog is not None:
            self.acceptance_watchdog.request_finished()

    @property
    def draws_as_core(self) -> bool:
        """Whether rows without seeds are drawn by SGLang's own sampler."""
        return not serves_on_npu()

    @property
    def draws_drafts(self) -> bool:
        """Whether verification asks what distribution a draft was drawn from."""
        return get_spec().speculative_use_rejection_sampling or isinstance(self.lossy, Threshold)

    @cached_property
    def relaxed(self) -> RelaxedInThinking | None:
        if not isinstance(self.lossy, Relaxed):
            return None
        num_rows = len(self.req_to_token_pool.req_to_token)
        tokenizer = self.target_worker.tokenizer
        return RelaxedInThinking(self.lossy, tokenizer, num_rows, self.device)

    @cached_property
    def penalties(self) -> RequestPenalties:
        num_rows = len(self.req_to_token_pool.req_to_token)
        vocab_size = self.target_worker.model_config.vocab_size
        return RequestPenalties(num_rows, vocab_size, self.device)

    @cached_property
    def step_constants(self) -> StepConstants:
        max_batch_size = len(self.req_to_token_pool.req_to_token)
        return StepConstants(self.speculative_num_steps, max_batch_size, self.device)

    @cached_property
    def _certain(self) -> torch.Tensor:
        """Probability 1 of every draft: the relay's field, which a chain does not read."""
        return torch.ones(len(self.req_to_token_pool.req_to_token), 1, device=self.device)

    def _batch_result(
        self, result: StepResult, models: BatchModels, replayed: bool
    ) -> GenerationBatchResult:
        drawn_from = models.sampling.next_draft_probs
        return GenerationBatchResult(
            logits_output=models.logits_output,
            next_token_ids=result.sampled.view(-1),
            can_run_cuda_graph=replayed,
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
            next_draft_input=EagleDraftInput(
                topk_p=self._certain[: len(result.candidates)],
                topk_index=result.candidates,
                bonus_tokens=result.candidates[:, 0],
                draft_probs=torch.stack(drawn_from, dim=1) if drawn_from else None,
            ),
            accept_lens=result.accept_lens,
            new_seq_lens=result.new_seq_lens,
            # The scheduler keeps these alive while the step may still be running.
            extra_keep_alive_refs=models.keep_alive,
        )


def _requests_of(batch: ScheduleBatch) -> Requests:
    return Requests(
        seq_lens=batch.seq_lens,
        req_pool_indices=batch.req_pool_indices,
        req_to_token=batch.req_to_token_pool.req_to_token,
        # Host knowledge: slots are allocated ahead of every length that a step can reach.
        max_kv_len=max(req.kv.kv_allocated_len for req in batch.reqs),
        page_size=batch.token_to_kv_pool_allocator.page_size,
    )
