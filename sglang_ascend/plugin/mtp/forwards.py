"""The step's forwards on SGLang's model runners: tensors in, ForwardBatch run, tensors out."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_model
from sglang.srt.speculative.eagle_info import (
    EagleDraftExtendInput,
    EagleDraftInput,
    EagleVerifyInput,
)
from sglang.srt.speculative.spec_utils import draft_tp_context, spec_stage_span

from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.speculative.step import Requests, Rows


@dataclass(frozen=True)
class StepModels:
    """What the step runs."""

    target: ModelRunner
    draft: ModelRunner
    draft_parallel_layout: Any  # how the MTP layer is split between ranks


class MTPForwards:
    """``speculative.step.Forwards`` of one step, launched or captured.

    One ForwardBatch is made, of the verified rows; the MTP layer's are views of it. The models are
    called as they are: these batches need none of the padding, planning and copying of inputs that
    a runner does before a forward of its own.
    """

    def __init__(self, models: StepModels, logits_buffer: torch.Tensor | None = None) -> None:
        self.models, self.logits_buffer = models, logits_buffer

    def target(
        self, rows: Rows, tokens: torch.Tensor, requests: Requests
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.begin(rows, tokens, requests)
        output = run_model(self.models.target, rows.metadata, self.forward_batch)
        return output.next_token_logits, output.hidden_states

    def begin(self, rows: Rows, tokens: torch.Tensor, requests: Requests) -> None:
        """Makes the ForwardBatch that the target runs and that the MTP layer's are views of."""
        runner = self.models.target
        self.forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(requests.seq_lens),
            input_ids=tokens,
            req_pool_indices=requests.req_pool_indices,
            seq_lens=requests.seq_lens,
            seq_lens_cpu=None,
            seq_lens_sum=None,
            orig_seq_lens=requests.seq_lens,
            out_cache_loc=rows.slots,
            positions=rows.positions,
            next_token_logits_buffer=self.logits_buffer,
            return_logprob=False,
            spec_algorithm=runner.spec_algorithm,
            spec_info=_verify_input(rows, tokens),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            global_forward_mode=ForwardMode.TARGET_VERIFY,
        )
        runner.kv_index_translator.bind_runner_slots(self.forward_batch)

    def mtp(
        self,
        rows: Rows,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        last_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        view = copy.copy(self.forward_batch)
        if last_rows is None:
            stage, view.forward_mode = "draft", ForwardMode.DECODE
            view.spec_info = EagleDraftInput(
                hidden_states=hidden, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
            )
        else:
            stage, view.forward_mode = "draft_extend", ForwardMode.DRAFT_EXTEND_V2
            view.spec_info = EagleDraftExtendInput(
                hidden_states=hidden,
                num_tokens_per_req=rows.metadata.query_len,
                num_tokens_for_logprob_per_req=1,
                # The head runs on one row per request.
                select_index=last_rows,
            )
        view.input_ids, view.positions, view.out_cache_loc = tokens, rows.positions, rows.slots
        view.seq_lens = rows.metadata.kv_lens
        view.capture_hidden_mode = CaptureHiddenMode.LAST
        view.next_token_logits_buffer = None
        view.global_num_token_non_padded_cpu = len(tokens)
        with draft_tp_context(self.models.draft_parallel_layout), spec_stage_span(stage):
            output = run_model(self.models.draft, rows.metadata, view)
        return output.next_token_logits, output.hidden_states


def run_model(runner: ModelRunner, metadata: StepMetadata, forward_batch: ForwardBatch) -> Any:
    """The runner's model on a batch whose tensors are final -> LogitsProcessorOutput."""
    runner.attn_backend.step_metadata = metadata
    context = ForwardContext(attn_backend=runner.attn_backend)
    with (
        get_model().override(shared_experts=runner.model.shared_experts_config),
        forward_context(context, forward_batch=forward_batch),
    ):
        return runner.model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch)


def _verify_input(rows: Rows, tokens: torch.Tensor) -> EagleVerifyInput:
    """The tree fields stay empty: a chain is causal attention over K+1 rows."""
    width = rows.metadata.query_len
    assert width is not None
    return EagleVerifyInput(
        draft_token=tokens,
        custom_mask=None,
        positions=rows.positions,
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
        prepared_out_cache_loc=rows.slots,
    )
