"""The step's forwards on SGLang's model runners: tensors in, ForwardBatch run, tensors out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.eagle_info import (
    EagleDraftExtendInput,
    EagleDraftInput,
    EagleVerifyInput,
)
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify
from sglang.srt.speculative.eagle_worker_common import prepare_for_draft_extend
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    draft_tp_context,
    spec_stage_span,
)

from sglang_ascend.ops import chain

if TYPE_CHECKING:
    from sglang_ascend.plugin.mtp_worker import MTPWorker


class BatchForwards:
    """``speculative.step.Forwards`` over one ScheduleBatch, whose fields it may edit freely:
    the scheduler restores them after the call."""

    def __init__(
        self,
        worker: MTPWorker,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Any,
    ) -> None:
        self.target_worker = worker.target_worker
        self.draft_worker = worker.draft_worker
        self.batch = batch
        self.num_draft_tokens = worker.speculative_num_draft_tokens
        self.on_publish = on_publish
        self.grammar_barrier = grammar_barrier
        self.logits_output: Any = None
        self.keep_alive: list[Any] = []
        # One gather for the whole step: verify, extend and the draft steps write this window.
        self.window = chain.window_slots(
            batch.seq_lens,
            batch.req_pool_indices,
            worker.req_to_token_pool.req_to_token,
            self.num_draft_tokens,
        ).view(-1, self.num_draft_tokens)
        self._draft_batch: ForwardBatch | None = None
        self._grammar_tree: GrammarTree | None = None

    def draft(
        self, step: int, tokens: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._on_draft("draft"):
            if self._draft_batch is None:
                self._draft_batch = self._prepare_draft()
            forward_batch = self._draft_batch
            forward_batch.input_ids = tokens
            forward_batch.out_cache_loc = self.window[:, step]
            forward_batch.positions = self.batch.seq_lens + step
            forward_batch.spec_info.hidden_states = hidden
            backend = self.draft_worker.draft_attn_backend.attn_backends[step]
            with forward_context(ForwardContext(attn_backend=backend), forward_batch=forward_batch):
                output = self.draft_worker.draft_runner.forward(forward_batch).logits_output
        return self.draft_worker.propose(output.next_token_logits), output.hidden_states

    def _prepare_draft(self) -> ForwardBatch:
        batch = self.batch
        batch.spec_info = EagleDraftInput(
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
            capture_hidden_mode=CaptureHiddenMode.LAST,
        )
        batch.spec_info.positions = batch.seq_lens
        batch.out_cache_loc = self.window[:, 0]
        forward_batch = ForwardBatch.init_new(
            batch,
            self.draft_worker.draft_runner,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            return_hidden_states_before_norm=False,
        )
        self.draft_worker.draft_attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        return forward_batch

    def verify(self, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.batch
        batch.spec_info = self._verify_input(candidates)
        forward_batch, _ = eagle_prepare_for_verify(
            batch.spec_info, batch.req_to_token_pool, batch, self.target_worker
        )
        self.keep_alive.append(forward_batch)
        if batch.has_grammar:
            # Starts its device-to-host copy before the target is launched.
            self._grammar_tree = GrammarTree.from_linear_chain(candidates)
        result = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        self.logits_output = result.logits_output
        return self.logits_output.next_token_logits, self.logits_output.hidden_states

    def _verify_input(self, candidates: torch.Tensor) -> EagleVerifyInput:
        """The tree fields stay empty: a chain is causal attention over K+1 rows."""
        offsets = torch.arange(self.num_draft_tokens, device=candidates.device)
        return EagleVerifyInput(
            draft_token=candidates.reshape(-1),
            custom_mask=None,
            positions=(self.batch.seq_lens[:, None] + offsets).reshape(-1),
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=self.num_draft_tokens - 1,
            topk=1,
            draft_token_num=self.num_draft_tokens,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            prepared_out_cache_loc=self.window.reshape(-1),
        )

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Draws every row with the sampler of plain decode: same filters, same seeds."""
        batch, width = self.batch, self.num_draft_tokens
        sampling_info = batch.sampling_info
        _adjust_logits(logits, sampling_info, width)
        if batch.has_grammar:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=self._grammar_tree,
                sampling_info=sampling_info,
                device=logits.device,
                barrier=self.grammar_barrier,
            )
            if mask is not None:
                mask.apply(logits)
        if sampling_info.is_all_greedy:
            return logits.argmax(dim=-1).view(-1, width)
        rows = _expand_sampling_info(sampling_info, width)
        probs = torch.softmax(logits / rows.temperatures, dim=-1)
        tokens, _ = self.target_worker.model_runner.sampler._sample_from_probs(
            probs, rows, batch.spec_info.positions, _is_plain(rows)
        )
        return tokens.view(-1, width)

    def publish(self, new_seq_lens: torch.Tensor) -> None:
        if self.on_publish is not None:
            self.on_publish(new_seq_lens)

    def extend(
        self, tokens: torch.Tensor, hidden: torch.Tensor, last_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._on_draft("draft_extend"):
            width = self.num_draft_tokens
            forward_batch = prepare_for_draft_extend(
                EagleDraftExtendInput(
                    hidden_states=hidden,
                    num_tokens_per_req=width,
                    num_tokens_for_logprob_per_req=width,
                    # The head runs on one row per request.
                    select_index=last_rows,
                ),
                self.batch,
                tokens.reshape(-1).long(),
                width,
                self.draft_worker.draft_runner,
                None,
                return_hidden_states_before_norm=False,
            )
            output = self.draft_worker.draft_runner.forward(forward_batch).logits_output
        return self.draft_worker.propose(output.next_token_logits), output.hidden_states[last_rows]

    @contextmanager
    def _on_draft(self, stage: str) -> Iterator[None]:
        with draft_tp_context(self.draft_worker.parallel_layout), spec_stage_span(stage):
            yield


def _adjust_logits(logits: torch.Tensor, sampling_info: SamplingBatchInfo, width: int) -> None:
    """Penalties and biases of each request on all its rows, in place.

    Penalties count the tokens committed before the step, as SGLang's own verify does.
    """
    if sampling_info.acc_additive_penalties is not None:
        logits.add_(sampling_info.acc_additive_penalties.repeat_interleave(width, dim=0))
    if sampling_info.acc_scaling_penalties is not None:
        scaling = sampling_info.acc_scaling_penalties.repeat_interleave(width, dim=0)
        apply_scaling_penalties(logits, scaling)
    if sampling_info.logit_bias is not None:
        logits.add_(sampling_info.logit_bias.repeat_interleave(width, dim=0))


def _expand_sampling_info(sampling_info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """Each request's parameters, once per verified row."""
    rows = copy.copy(sampling_info)
    for name in ("temperatures", "top_ks", "top_ps", "min_ps", "sampling_seed"):
        value = getattr(sampling_info, name)
        if value is not None:
            setattr(rows, name, value.repeat_interleave(width, dim=0))
    rows.sampling_mask_batch_indices = None
    return rows


def _is_plain(sampling_info: SamplingBatchInfo) -> bool:
    return not (
        sampling_info.need_top_p_sampling
        or sampling_info.need_top_k_sampling
        or sampling_info.need_min_p_sampling
    )
