"""The step on a device that replays graphs: captured at start, once for each batch size."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.runtime_context import get_disagg
from sglang.srt.utils.common import DynamicGradMode

from sglang_ascend.ops import sampling
from sglang_ascend.ops.chain.reference import StepInputs
from sglang_ascend.plugin.mtp_forwards import (
    BatchModels,
    MTPForwards,
    run_model,
    verify_input,
)
from sglang_ascend.speculative.step import Requests, speculative_step

if TYPE_CHECKING:
    from sglang_ascend.plugin.mtp_worker import MTPWorker

logger = logging.getLogger(__name__)

# Runs before a capture, so that nothing is compiled, loaded or planned within it.
NUM_WARM_UPS = 2


class StepBuffers:
    """What every captured step reads, at addresses that stay: rows of the largest batch.

    Rows of no request are a request without tokens in row 0 of the slot table, which no request
    owns: they write to slot 0.
    """

    def __init__(self, max_batch_size: int, width: int, vocab_size: int, device: str) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.candidates = zeros(max_batch_size, width)
        self.seq_lens = zeros(max_batch_size)
        self.req_pool_indices = zeros(max_batch_size)
        self.sampled = zeros(max_batch_size, width)
        self.accept_lens = torch.ones(max_batch_size, dtype=torch.int32, device=device)
        self.logits = zeros(max_batch_size * width, vocab_size, dtype=torch.float32)
        self._num_filled = 0

    def fill(self, candidates: torch.Tensor, requests: Requests) -> None:
        batch_size = len(candidates)
        self.candidates[:batch_size].copy_(candidates)
        self.seq_lens[:batch_size].copy_(requests.seq_lens)
        self.req_pool_indices[:batch_size].copy_(requests.req_pool_indices)
        if batch_size < self._num_filled:
            self.seq_lens[batch_size : self._num_filled].zero_()
            self.req_pool_indices[batch_size : self._num_filled].zero_()
        self._num_filled = batch_size


@dataclass(frozen=True)
class StepGraph:
    """One captured step, and where its parts leave their results."""

    until_logits: Any  # torch.npu.NPUGraph
    from_sampled: Any
    inputs: StepInputs
    logits: torch.Tensor  # [batch * (K+1), vocab_size]
    next_candidates: torch.Tensor  # int64 [batch, K+1]


class CapturedModels(MTPForwards):
    """``speculative.step.Models`` on the buffers; ``between`` runs where sampling would."""

    def __init__(self, worker: MTPWorker, buffers: StepBuffers, between: Callable[[], None]):
        super().__init__(worker)
        self.draft_vocabulary = worker.draft_worker.hot_token_id
        self.buffers, self.between = buffers, between

    def verify(
        self, inputs: StepInputs, candidates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch_size, width = candidates.shape
        self.inputs = inputs
        self.see_verified_rows(inputs)
        runner = self.target_worker.model_runner
        self.forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=batch_size,
            input_ids=candidates.view(-1),
            req_pool_indices=self.buffers.req_pool_indices[:batch_size],
            seq_lens=self.buffers.seq_lens[:batch_size],
            seq_lens_cpu=None,
            seq_lens_sum=None,
            orig_seq_lens=self.buffers.seq_lens[:batch_size],
            out_cache_loc=inputs.row_slots,
            positions=inputs.positions,
            next_token_logits_buffer=self.buffers.logits[: batch_size * width],
            return_logprob=False,
            spec_algorithm=runner.spec_algorithm,
            spec_info=verify_input(inputs, candidates),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            global_forward_mode=ForwardMode.TARGET_VERIFY,
        )
        runner.kv_index_translator.bind_runner_slots(self.forward_batch)
        output = run_model(runner, self.metadata, self.forward_batch)
        self.logits = output.next_token_logits
        return output.next_token_logits, output.hidden_states

    def accept(
        self, logits: torch.Tensor, candidates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.between()
        batch_size = len(candidates)
        return self.buffers.sampled[:batch_size], self.buffers.accept_lens[:batch_size]

    def publish(self, new_seq_lens: torch.Tensor) -> None:
        self.new_seq_lens = new_seq_lens

    def propose(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        tokens = sampling.greedy(logits)
        return tokens if self.draft_vocabulary is None else self.draft_vocabulary[tokens]


class StepGraphs:
    """The captured steps of a worker."""

    def __init__(self, worker: MTPWorker) -> None:
        self.worker = worker
        target = worker.target_worker.model_runner
        self.batch_sizes, _ = get_batch_sizes_to_capture(target)
        self.buffers = StepBuffers(
            self.batch_sizes[-1],
            worker.speculative_num_draft_tokens,
            target.model_config.vocab_size,
            worker.device,
        )
        self.device_module = torch.get_device_module(worker.device)
        self.pool = self.device_module.graph_pool_handle()
        self.graphs: dict[int, StepGraph] = {}
        started = time.perf_counter()
        with DynamicGradMode(), model_capture_mode(), graph_capture() as context:
            # The largest first: the others then fit into its memory.
            for batch_size in reversed(self.batch_sizes):
                self.graphs[batch_size] = self._capture(batch_size, context.stream)
        logger.info(
            "Captured MTP's step for batches of %s in %.1f s.",
            self.batch_sizes,
            time.perf_counter() - started,
        )

    def graph_for(self, batch_size: int) -> StepGraph | None:
        """The smallest that holds so many requests."""
        place = bisect.bisect_left(self.batch_sizes, batch_size)
        return self.graphs[self.batch_sizes[place]] if place < len(self.batch_sizes) else None

    def _capture(self, batch_size: int, stream: Any) -> StepGraph:
        for _ in range(NUM_WARM_UPS):
            self._run(batch_size, lambda: None)
        self.device_module.synchronize()
        until_logits, from_sampled = (self.device_module.NPUGraph() for _ in range(2))
        with ExitStack() as stack:

            def capture(part: Any) -> None:
                stack.enter_context(self.device_module.graph(part, pool=self.pool, stream=stream))

            def between() -> None:
                stack.close()
                capture(from_sampled)

            capture(until_logits)
            models, next_candidates = self._run(batch_size, between)
        return StepGraph(until_logits, from_sampled, models.inputs, models.logits, next_candidates)

    def _run(
        self, batch_size: int, between: Callable[[], None]
    ) -> tuple[CapturedModels, torch.Tensor]:
        worker, buffers = self.worker, self.buffers
        models = CapturedModels(worker, buffers, between)
        table = worker.req_to_token_pool.req_to_token
        requests = Requests(
            seq_lens=buffers.seq_lens[:batch_size],
            req_pool_indices=buffers.req_pool_indices[:batch_size],
            req_to_token=table,
            max_kv_len=table.shape[1],
            page_size=worker.page_size,
        )
        candidates = buffers.candidates[:batch_size]
        result = speculative_step(candidates, requests, worker.step_constants, models)
        return models, result.candidates


class ReplayedBatch:
    """``speculative.step.ReplayedModels``: a batch on the graph of its size."""

    def __init__(self, graph: StepGraph, buffers: StepBuffers, batch: BatchModels) -> None:
        self.graph, self.buffers, self.batch = graph, buffers, batch
        self.publish = batch.publish
        self.accept = batch.accept

    def verify(self, requests: Requests, candidates: torch.Tensor) -> torch.Tensor:
        num_rows = candidates.numel()
        self.buffers.fill(candidates, requests)
        self.batch.sampling.read_chain(candidates)
        self.graph.until_logits.replay()
        logits = self.graph.logits[:num_rows]
        self.batch.positions = self.graph.inputs.positions[:num_rows]
        self.batch.logits_output = LogitsProcessorOutput(next_token_logits=logits)
        return logits

    def extend(self, sampled: torch.Tensor, accept_lens: torch.Tensor) -> torch.Tensor:
        batch_size = len(sampled)
        self.buffers.sampled[:batch_size].copy_(sampled)
        self.buffers.accept_lens[:batch_size].copy_(accept_lens)
        self.graph.from_sampled.replay()
        # Read by the relay, or by the next step, before any step is replayed again.
        return self.graph.next_candidates[:batch_size]


def captured_steps(worker: MTPWorker) -> StepGraphs | None:
    """None where graphs are switched off (--cuda-graph-backend-decode disabled), or nothing is
    decoded."""
    off = check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
    if off or get_disagg().disaggregation_mode == "prefill":
        return None
    return StepGraphs(worker)
