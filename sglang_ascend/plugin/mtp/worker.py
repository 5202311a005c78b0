"""SGLang's speculative worker slot: a ScheduleBatch in, one speculative step, a result out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_device, get_parallel, get_schedule, get_spec
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import get_plan_stream

from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.mtp import forwards
from sglang_ascend.plugin.mtp.adaptive.chains import Chains, make_chains
from sglang_ascend.plugin.mtp.adaptive.first_chains import FirstChains
from sglang_ascend.plugin.mtp.draft_worker import MTPDraftWorker
from sglang_ascend.plugin.mtp.sampling import lossy_acceptance
from sglang_ascend.plugin.mtp.sampling.batch import (
    BatchSampling,
    EndedRequests,
    SamplingParts,
    make_sampling_parts,
)
from sglang_ascend.plugin.mtp.step_graphs import decodes, prepare_steps
from sglang_ascend.plugin.mtp.target import prepare_target
from sglang_ascend.plugin.observability.step import (
    make_acceptance_counts,
    make_timeline,
    make_watchdog,
)
from sglang_ascend.plugin.requests.prompt_embeddings import embed_other_prompts
from sglang_ascend.plugin.requests.seeds import RequestSeeds
from sglang_ascend.sampling.lossy import Threshold
from sglang_ascend.speculative.captured import CapturedPhases, CapturedSteps
from sglang_ascend.speculative.drawn import DrawnDrafts
from sglang_ascend.speculative.padded import PaddedPhases
from sglang_ascend.speculative.step import (
    LaunchedPhases,
    Phases,
    StepConstants,
    StepResult,
    speculative_step,
)


class MTPWorker(EAGLEWorkerV2):
    """Prefill as SGLang's EAGLE worker has it; decode is ``speculative.step.speculative_step``."""

    draft_worker_cls = MTPDraftWorker
    captured_steps: CapturedSteps | None = None

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: Any
    ) -> None:
        self.lossy = lossy_acceptance.policy()
        lossy_acceptance.warn(self.lossy)
        self._init_as_eagle(server_args, gpu_id, nccl_port, target_worker)
        prepare_target(target_worker, self._draft_worker.draft_runner)
        self.seeds = RequestSeeds()
        self.acceptance_watchdog = make_watchdog(self.speculative_num_steps)
        self.acceptance_counts = make_acceptance_counts(self.speculative_num_steps)
        self.step_timeline = make_timeline()
        self.chains: Chains | None = None
        waits = not device_profile().launches_ahead and not forwards.ranks_share_rows()
        self.ended = EndedRequests() if waits else None
        self._results_until_none = 0  # that the scheduler has to process, of a step left out; or 0

    def _init_as_eagle(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: Any
    ) -> None:
        """EAGLEWorkerV2.__init__, which names its own draft worker class (patch 0009)."""
        BaseSpecWorker.__init__(self)
        self.server_args, self.gpu_id, self._target_worker = server_args, gpu_id, target_worker
        self.device, self.page_size = get_device().device, get_schedule().page_size
        spec = get_spec()
        self.topk, self.adaptive_controller = spec.speculative_eagle_topk, None
        self.speculative_num_steps = spec.speculative_num_steps
        self.speculative_num_draft_tokens = spec.speculative_num_draft_tokens
        self.speculative_algorithm = SpeculativeAlgorithm.from_string(spec.speculative_algorithm)
        self.enable_dp_spec_prefill_coordination = False
        self.plan_stream, self.plan_stream_ctx = get_plan_stream(self.device)
        self._draft_worker = self.draft_worker_cls(server_args, gpu_id, nccl_port, target_worker)

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        if not batch.sampling_info.is_all_greedy:
            self.seeds.give(batch)
        is_relayed = on_publish is not None or not self.draws_drafts
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            if self.ended is not None:
                self.ended.forget()
            if not is_relayed:
                self.drawn.keep(batch.req_pool_indices, None)
            if batch.decoding_reqs and grammar_barrier is not None:
                grammar_barrier()  # the tokens of a mixed chunk follow those of the step before
            return self._prefill(batch, on_publish, pp_proxy_tensors)
        if batch.spec_info is None:  # an idle rank's, which steps beside the others
            batch.spec_info = forwards.no_chains(self.speculative_num_draft_tokens, self.device)
        if not is_relayed:
            batch.spec_info.drawn_from = partial(self.drawn.of, batch.req_pool_indices)
        publish = on_publish or (lambda new_seq_lens: None)  # without overlap the result tells it
        if self.ended is not None and self.ended.are_all(batch):
            publish(batch.seq_lens + 1)
            return self._no_step(batch)
        if self.first_chains.begun:
            self.first_chains.complete(batch)
        verified = drafted = self.speculative_num_steps
        if self.chains is not None:
            verified, drafted = self.chains.begin(batch)
        sampling = BatchSampling(self.sampling_parts, batch, verified + 1, grammar_barrier)
        phases = self._phases(batch, sampling, verified, drafted)
        timeline = self.step_timeline
        result = speculative_step(
            forwards.chains_of(batch, verified + 1, is_relayed=on_publish is not None),
            forwards.requests_of(batch),
            phases if timeline is None else timeline.begin(phases),
            sampling,
            publish,
        )
        batch_result = self._batch_result(batch, result, phases, sampling)
        if not is_relayed:
            # Core would join the draft_probs of some requests to none of others.
            next_input = batch_result.next_draft_input
            self.drawn.keep(batch.req_pool_indices, next_input.draft_probs)
            next_input.draft_probs = None
        if timeline is not None:
            timeline.finish(len(batch.reqs))
        if self.ended is not None:
            self.ended.note(batch, result)
        return batch_result

    def _phases(
        self, batch: ScheduleBatch, sampling: BatchSampling, verified: int, drafted: int
    ) -> Phases:
        batch_size = forwards.common_batch_size(batch)  # by which ranks agree on graph or not
        # Drafts that are drawn need the batch's own sampling parameters within the captured part.
        if self.captured_steps is not None and not sampling.draws_drafts:
            captured = self.captured_steps.that_holds(batch_size, verified)
            if captured is not None:
                if self.chains is not None:
                    self.chains.before_replay(batch, self.models, verified)
                return captured
        launched = LaunchedPhases(
            forwards.MTPForwards(self.models),
            sampling.propose,
            self.step_constants[verified],
            drafted,
            drafting=self.step_constants[max(verified, drafted)],
            at_once=self.sampling_parts.have_whole_head and not sampling.draws_drafts,
        )
        if batch_size > len(batch.reqs):
            return PaddedPhases(launched, batch_size)
        if self.chains is None:
            return launched
        return self.chains.phases(launched, batch_size, sampling.next_draft_probs)

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        self.chains = make_chains(
            self.speculative_num_steps,
            self.speculative_num_draft_tokens,
            self.target_worker,
            self.draft_worker.is_separate_model,
        )
        parts = self.sampling_parts  # before any request: it may refuse
        if device_profile().captures_step and decodes():
            of_length, skipped = self.step_constants[-1:], None
            if self.chains is not None:  # adaptive: K is 0 to that one
                of_length, skipped = self.step_constants, self.chains.skipped
            step = self.models, parts, of_length, self.page_size, skipped
            self.captured_steps = prepare_steps(*step)

    def _prefill(self, batch: ScheduleBatch, *args: Any) -> GenerationBatchResult:
        """As SGLang's, with the start of what is counted of each request's output."""
        embed_other_prompts(batch, self.models.target.model)
        self.sampling_parts.before_prefill(batch)
        if self.chains is not None:
            self.draft_worker.skipped = self.chains.before_prefill(batch, self.models)
        result = self._forward_prefill_batch(batch, *args)
        self.first_chains.keep(batch.reqs, result.next_draft_input, self.draft_worker.skipped)
        return result

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """The scheduler has the accepted drafts of a step on the host."""
        if self._results_until_none:
            self._results_until_none -= 1
            if self._results_until_none == 0:
                return
        accepted, num_drafts = num_correct_drafts_per_req, self.speculative_num_steps
        if self.chains is not None:
            accepted, num_drafts = self.chains.settle(accepted)
        if self.acceptance_watchdog is not None and num_drafts > 0:
            self.acceptance_watchdog.record(accepted, num_drafts)
        if self.acceptance_counts is not None:
            self.acceptance_counts.record(accepted, num_drafts)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        if self.acceptance_watchdog is not None:
            self.acceptance_watchdog.request_finished()

    @property
    def draws_drafts(self) -> bool:
        """Whether verification asks what distribution a draft was drawn from."""
        return get_spec().speculative_use_rejection_sampling or isinstance(self.lossy, Threshold)

    @cached_property
    def drawn(self) -> DrawnDrafts:
        """Without overlap, where nothing is relayed from step to step."""
        num_rows = len(self.req_to_token_pool.req_to_token)
        return DrawnDrafts(num_rows, self.speculative_num_steps, self.device)

    @cached_property
    def models(self) -> forwards.StepModels:
        target, draft = self.target_worker.model_runner, self.draft_worker
        return forwards.StepModels(target, draft.draft_runner, draft.parallel_layout)

    @cached_property
    def sampling_parts(self) -> SamplingParts:
        return make_sampling_parts(
            self.target_worker, self._draft_worker, self.lossy, self.draws_drafts
        )

    @cached_property
    def step_constants(self) -> list[StepConstants]:
        """Of every length of a chain."""
        max_batch_size = len(self.req_to_token_pool.req_to_token) + get_parallel().attn_tp_size
        return [
            StepConstants(k, max_batch_size, self.device)
            for k in range(self.speculative_num_draft_tokens)
        ]

    @cached_property
    def first_chains(self) -> FirstChains:
        return FirstChains(self.models, self.sampling_parts, self.step_constants, self.chains)

    @cached_property
    def _certain(self) -> torch.Tensor:
        """Probability 1 of every draft: the relay's field, which a chain does not read."""
        return torch.ones(len(self.req_to_token_pool.req_to_token), 1, device=self.device)

    def _no_step(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Of requests that have all ended: a token each, which the scheduler drops."""
        self._results_until_none = 2  # behind that of the step that ended them
        chain = batch.spec_info.topk_index
        logits, one_each = torch.empty(len(chain), 0), torch.ones(len(chain), dtype=torch.int32)
        result = StepResult(logits, chain, one_each, batch.seq_lens + 1, chain)
        sampling = BatchSampling(self.sampling_parts, batch, chain.shape[1], None)
        return self._batch_result(batch, result, None, sampling)

    def _batch_result(
        self,
        batch: ScheduleBatch,
        result: StepResult,
        phases: Phases | None,
        sampling: BatchSampling,
    ) -> GenerationBatchResult:
        logits_output = LogitsProcessorOutput(next_token_logits=result.logits)
        if batch.return_hidden_states and phases is not None:
            # Of each emitted token the row that it was drawn from.
            logits_output.hidden_states = phases.hidden
        tokens, drawn_from = result.sampled.view(-1), sampling.next_draft_probs
        candidates = self.chains.end(result.candidates) if self.chains else result.candidates
        if batch.return_logprob:
            compute_spec_logprobs(batch, logits_output, tokens, chain_stride=sampling.width)
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=tokens,
            can_run_cuda_graph=isinstance(phases, CapturedPhases),
            speculative_num_draft_tokens=sampling.width,
            next_draft_input=EagleDraftInput(
                topk_p=self._certain[: len(result.candidates)],
                topk_index=candidates,
                bonus_tokens=result.candidates[:, 0],
                draft_probs=torch.stack(drawn_from, dim=1) if drawn_from else None,
            ),
            accept_lens=result.accept_lens,
            new_seq_lens=result.new_seq_lens,
            # The scheduler keeps these alive while the step may still be running.
            extra_keep_alive_refs=[phases],
        )
