"""Compiles the step when the server starts, and captures it in SGLang's graphs, once for each K and
batch size."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.model_executor.runner_utils.deepep_adapter import DeepEPCudaGraphRunnerAdapter
from sglang.srt.runtime_context import get_disagg, get_parallel
from sglang.srt.utils.common import DynamicGradMode

from sglang_ascend.plugin.mtp.forwards import MTPForwards, StepModels
from sglang_ascend.plugin.mtp.sampling.batch import SamplingParts
from sglang_ascend.speculative.captured import (
    CapturedPhases,
    CapturedSteps,
    Graph,
    StepBuffers,
    capture_phases,
    warm_up,
)
from sglang_ascend.speculative.skipped import SkippedRows
from sglang_ascend.speculative.step import LaunchedPhases, StepConstants

logger = logging.getLogger(__name__)


def decodes() -> bool:
    """False where another server decodes what this one has prefilled."""
    return get_disagg().disaggregation_mode != "prefill"


def decodes_by_graphs() -> bool:
    """False where graphs are switched off (--cuda-graph-backend-decode disabled)."""
    return decodes() and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)


def prepare_steps(
    models: StepModels,
    sampling: SamplingParts,
    of_length: Sequence[StepConstants],
    page_size: int,
    skipped: SkippedRows | None,
) -> CapturedSteps | None:
    """Every step that a request may meet is compiled, and captured where graphs are on."""
    step = models, sampling, of_length, page_size, skipped
    # In this order: that rows were kept by then has the graphs forget those that they run.
    compile_step(*step)
    captured = capture_steps(*step) if decodes_by_graphs() else None
    if skipped is not None:
        skipped.begin_anew()
    return captured


def compile_step(
    models: StepModels,
    sampling: SamplingParts,
    of_length: Sequence[StepConstants],
    page_size: int,
    skipped: SkippedRows | None,
) -> None:
    """So that no request waits for a compiler: by graphs or not, steps may be launched. ``skipped``
    takes the rows of those that draft nothing."""
    target, propose = models.target, sampling.propose_likeliest
    req_to_token = target.req_to_token_pool.req_to_token
    vocab_size = target.model_config.vocab_size
    started = time.perf_counter()
    with DynamicGradMode():
        # Ranks that share the heads of a batch each reduce a part of its rows.
        multiple = get_parallel().attn_tp_size
        for constants in of_length:
            phases = LaunchedPhases(MTPForwards(models), propose, constants, skipped=skipped)
            warm_up(phases, constants, req_to_token, page_size, vocab_size, multiple)
    logger.info("Compiled MTP's step in %.1f s.", time.perf_counter() - started)


def capture_steps(
    models: StepModels,
    sampling: SamplingParts,
    of_length: Sequence[StepConstants],
    page_size: int,
    skipped: SkippedRows | None,
) -> CapturedSteps:
    """The step of every K and of every batch size that SGLang would capture."""
    target = models.target
    batch_sizes, _ = get_batch_sizes_to_capture(target)
    # One buffer for every K: sampling reads it before another step is replayed.
    most_rows = batch_sizes[-1] * (of_length[-1].num_steps + 1)
    logits = torch.zeros(most_rows, target.model_config.vocab_size, device=target.device)
    req_to_token = target.req_to_token_pool.req_to_token
    device_module = torch.get_device_module(target.device)
    memory = device_module.graph_pool_handle()
    # Of the buffers through which rows travel to their experts, if they do: a prefill leaves them
    # to be cleaned.
    exchange = DeepEPCudaGraphRunnerAdapter()
    exchange.capture(is_extend_in_batch=False)

    def capture_for(
        batch_size: int, buffers: StepBuffers, constants: StepConstants, stream: Any
    ) -> CapturedPhases:
        def capture(run: Callable[[], Any]) -> tuple[Graph, Any]:
            graph = device_module.NPUGraph()
            with device_module.graph(graph, pool=memory, stream=stream):
                return graph, run()

        forwards = MTPForwards(models, logits[: batch_size * (constants.num_steps + 1)])
        propose = sampling.propose_likeliest
        phases = LaunchedPhases(forwards, propose, constants, skipped=skipped)
        requests = buffers.requests(batch_size, req_to_token, page_size)
        synchronize = device_module.synchronize
        return capture_phases(phases, buffers, requests, capture, synchronize, exchange.replay)

    started = time.perf_counter()
    captured: dict[int, dict[int, CapturedPhases]] = {}
    with DynamicGradMode(), model_capture_mode(), graph_capture() as context:
        # The largest first: the others then fit into its memory.
        for constants in reversed(of_length):
            buffers = StepBuffers(batch_sizes[-1], constants.num_steps + 1, target.device)
            captured[constants.num_steps] = {
                size: capture_for(size, buffers, constants, context.stream)
                for size in reversed(batch_sizes)
            }
    seconds = time.perf_counter() - started
    logger.info("Captured MTP's step for batches of %s in %.1f s.", batch_sizes, seconds)
    return CapturedSteps(captured)
