"""The step's forwards on SGLang's model runners: tensors in, ForwardBatch run, tensors out."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_model
from sglang.srt.speculative.eagle_info import (
    EagleDraftExtendInput,
    EagleDraftInput,
    EagleVerifyInput,
)
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify
from sglang.srt.speculative.spec_utils import draft_tp_context, spec_stage_span

from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.ops.chain.reference import StepInputs, TailInputs
from sglang_ascend.plugin.batch_sampling import BatchSampling
from sglang_ascend.plugin.pool_attention import with_metadata

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_ascend.plugin.mtp_worker import MTPWorker


class MTPForwards(ABC):
    """The MTP layer's forwards of one step, on views of the ForwardBatch that was verified."""

    forward_batch: ForwardBatch  # of the verified rows
    metadata: StepMetadata  # theirs
    new_seq_lens: torch.Tensor  # int64 [batch], once they are known

    def __init__(self, worker: MTPWorker) -> None:
        self.target_worker = worker.target_worker
        self.draft_worker = worker.draft_worker
        self.num_draft_tokens = worker.speculative_num_draft_tokens

    def see_verified_rows(self, inputs: StepInputs) -> None:
        """What the target and the MTP layer's extend are told, both the same."""
        self.metadata = StepMetadata(
            inputs.block_table,
            inputs.kv_lens,
            page_size=inputs.page_size,
            query_len=self.num_draft_tokens,
        )

    @abstractmethod
    def propose(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draft tokens of one row per request, as ``BatchSampling.propose``."""

    def extend(
        self, tokens: torch.Tensor, hidden: torch.Tensor, last_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._on_draft("draft_extend"):
            spec_info = EagleDraftExtendInput(
                hidden_states=hidden,
                num_tokens_per_req=self.num_draft_tokens,
                num_tokens_for_logprob_per_req=1,
                # The head runs on one row per request.
                select_index=last_rows,
            )
            return self._run_mtp(
                ForwardMode.DRAFT_EXTEND_V2,
                self.metadata,
                spec_info,
                self.new_seq_lens,
                input_ids=tokens.view(-1),
                seq_lens=self.metadata.kv_lens,
            )

    def tail(
        self, j: int, tail: TailInputs, tokens: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._on_draft("draft"):
            spec_info = EagleDraftInput(
                hidden_states=hidden, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
            )
            metadata = replace(self.metadata, kv_lens=tail.kv_lens[j], query_len=1)
            return self._run_mtp(
                ForwardMode.DECODE,
                metadata,
                spec_info,
                metadata.kv_lens,
                input_ids=tokens,
                seq_lens=metadata.kv_lens,
                positions=tail.positions[j],
                out_cache_loc=tail.slots[j],
            )

    def _run_mtp(
        self,
        mode: ForwardMode,
        metadata: StepMetadata,
        spec_info: Any,
        last_positions: torch.Tensor,
        **changed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The MTP layer on a view of the verify batch -> (draft tokens, hidden states).

        ``last_positions`` [batch] are those of the tokens that the drafts follow.

        The model is called as it is: its batch needs none of the padding, planning and copying
        of inputs that a runner does before a forward of its own.
        """
        view = copy.copy(self.forward_batch)
        view.forward_mode, view.spec_info = mode, spec_info
        view.capture_hidden_mode = CaptureHiddenMode.LAST
        view.return_logprob = False
        view.next_token_logits_buffer = None
        for name, tensor in changed.items():
            setattr(view, name, tensor)
        view.global_num_token_non_padded_cpu = len(view.input_ids)
        output = run_model(self.draft_worker.draft_runner, metadata, view)
        tokens = self.propose(output.next_token_logits, last_positions)
        return tokens, output.hidden_states

    @contextmanager
    def _on_draft(self, stage: str) -> Iterator[None]:
        with draft_tp_context(self.draft_worker.parallel_layout), spec_stage_span(stage):
            yield


def run_model(runner: ModelRunner, metadata: StepMetadata, forward_batch: ForwardBatch) -> Any:
    """The runner's model on a batch whose tensors are final -> LogitsProcessorOutput."""
    runner.attn_backend.step_metadata = metadata
    context = ForwardContext(attn_backend=runner.attn_backend)
    with (
        get_model().override(shared_experts=runner.model.shared_experts_config),
        forward_context(context, forward_batch=forward_batch),
    ):
        return runner.model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch)


class BatchModels(MTPForwards):
    """``speculative.step.Models`` over one ScheduleBatch, whose fields it may edit freely: the
    scheduler restores them after the call.

    One ForwardBatch is built, for the verify forward; the MTP layer's are views of it.
    """

    def __init__(
        self,
        worker: MTPWorker,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Any,
    ) -> None:
        super().__init__(worker)
        self.batch = batch
        self.on_publish = on_publish
        self.sampling = BatchSampling(worker, batch, grammar_barrier)
        self.logits_output: Any = None
        self.keep_alive: list[Any] = []

    def verify(
        self, inputs: StepInputs, candidates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.batch
        self.see_verified_rows(inputs)
        batch.spec_info = with_metadata(verify_input(inputs, candidates), self.metadata)
        self.forward_batch, _ = eagle_prepare_for_verify(
            batch.spec_info, batch.req_to_token_pool, batch, self.target_worker
        )
        self.positions = inputs.positions
        self.keep_alive += [inputs, self.forward_batch]
        self.sampling.read_chain(candidates)
        result = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=self.forward_batch, is_verify=True
        )
        self.logits_output = result.logits_output
        return self.logits_output.next_token_logits, self.logits_output.hidden_states

    def accept(
        self, logits: torch.Tensor, candidates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.sampling.accept(logits, candidates, self.positions)

    def publish(self, new_seq_lens: torch.Tensor) -> None:
        self.new_seq_lens = new_seq_lens
        if self.on_publish is not None:
            self.on_publish(new_seq_lens)

    def propose(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.sampling.propose(logits, positions)


def verify_input(inputs: StepInputs, candidates: torch.Tensor) -> EagleVerifyInput:
    """The tree fields stay empty: a chain is causal attention over K+1 rows."""
    width = candidates.shape[1]
    return EagleVerifyInput(
        draft_token=candidates.view(-1),
        custom_mask=None,
        positions=inputs.positions,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=width - 1,
        topk=1,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
        prepared_out_cache_loc=inputs.row_slots,
    )
