"""The step's forwards on SGLang's model runners: tensors in, ForwardBatch run, tensors out."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.dp_attention import (
    DpPaddingMode,
    set_dp_buffer_len_from_batch,
    set_is_extend_in_batch,
)
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_model, get_parallel
from sglang.srt.speculative.eagle_info import (
    EagleDraftExtendInput,
    EagleDraftInput,
    EagleVerifyInput,
)
from sglang.srt.speculative.spec_utils import draft_tp_context, spec_stage_span
from sglang.srt.utils.common import ceil_align, require_gathered_buffer

from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.ops.chain.reference import DraftDecodeInputs
from sglang_ascend.speculative.forwards import Requests, Rows


@dataclass(frozen=True)
class StepModels:
    """What the step runs."""

    target: ModelRunner
    draft: ModelRunner
    draft_parallel_layout: Any  # how the MTP layer is split between ranks


class MTPForwards:
    """``speculative.forwards.Forwards`` of one step, launched or captured.

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
        exchange_rows(self.forward_batch, runner, len(tokens), len(tokens))

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
        num_logits = len(tokens if last_rows is None else last_rows)
        exchange_rows(view, self.models.draft, len(tokens), num_logits)
        with draft_tp_context(self.models.draft_parallel_layout), spec_stage_span(stage):
            output = run_model(self.models.draft, rows.metadata, view)
        return output.next_token_logits, output.hidden_states

    def chain(
        self,
        ahead: DraftDecodeInputs,
        metadata: StepMetadata,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
    ) -> torch.Tensor | None:
        runner = self.models.draft
        chain = getattr(runner.model.forward, "chain", None)
        if chain is None:
            return None
        context = ForwardContext(attn_backend=runner.attn_backend)
        with forward_context(context, forward_batch=self.forward_batch):
            return chain(ahead, metadata, tokens, hidden)


def chains_of(batch: ScheduleBatch, width: int, is_relayed: bool) -> torch.Tensor:
    """What a step verifies, int64 [batch, width].

    A relay gathers them anew. Without one they lie where the step before left them, which may be
    memory of a graph that this step replays before it has read them.
    """
    chains = batch.spec_info.topk_index[:, :width]
    return chains.contiguous() if is_relayed else chains.clone()


def requests_of(batch: ScheduleBatch) -> Requests:
    return Requests(
        seq_lens=batch.seq_lens,
        req_pool_indices=batch.req_pool_indices,
        req_to_token=batch.req_to_token_pool.req_to_token,
        # Host knowledge: slots are allocated ahead of every length that a step can reach.
        max_kv_len=max((req.kv.kv_allocated_len for req in batch.reqs), default=0),
        page_size=batch.token_to_kv_pool_allocator.page_size,
    )


def no_chains(width: int, device: torch.device | str) -> EagleDraftInput:
    """What a step of no request is given."""
    return EagleDraftInput(topk_index=torch.empty(0, width, dtype=torch.int64, device=device))


def common_batch_size(batch: ScheduleBatch) -> int:
    """Requests of the rank that has most, which each rank's step has rows for.

    Under data-parallel attention every rank enters every forward, with rows of no request if need
    be: experts and head take the rows of all ranks, and each knows the counts of all.
    """
    parallel = get_parallel()
    if not ranks_share_rows():
        return len(batch.reqs)
    # Ranks that share the heads of a batch each reduce a part of its rows.
    of_fullest = max(batch.global_num_tokens) if parallel.attn_dp_size > 1 else len(batch.reqs)
    return ceil_align(of_fullest, parallel.attn_tp_size)


def ranks_share_rows() -> bool:
    """Whether a rank holds a part of a forward's rows between its layers: under data-parallel
    attention, and where rows travel to ranks that hold their experts."""
    return get_parallel().attn_dp_size > 1 or require_gathered_buffer()


def exchange_rows(
    forward_batch: ForwardBatch, runner: ModelRunner, num_rows: int, num_logits: int
) -> None:
    """Tells SGLang's layers that each rank has ``num_rows`` rows in this forward, ``num_logits`` of
    them for the head, as ``ForwardBatch.prepare_mlp_sync_batch`` does for forwards of its own, and
    that it is no prefill: experts are exchanged by kernels that a graph holds."""
    if not ranks_share_rows():
        return
    num_ranks = get_parallel().attn_dp_size
    fill = forward_batch.seq_lens.new_full
    forward_batch.global_num_tokens_cpu = [num_rows] * num_ranks
    forward_batch.global_num_tokens_gpu = fill((num_ranks,), num_rows)
    forward_batch.global_num_tokens_for_logprob_cpu = [num_logits] * num_ranks
    forward_batch.global_num_tokens_for_logprob_gpu = fill((num_ranks,), num_logits)
    forward_batch.dp_padding_mode = DpPaddingMode.MAX_LEN
    forward_batch.global_dp_buffer_len = num_rows * num_ranks
    # Computed from the counts when first asked for.
    forward_batch.dp_local_start_pos = forward_batch.dp_local_num_tokens = None
    forward_batch.attn_tp_sequence_sharded = runner.attn_tp_sequence_sharded(num_rows)
    set_dp_buffer_len_from_batch(forward_batch)
    set_is_extend_in_batch(False)


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
