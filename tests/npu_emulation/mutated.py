"""python -m npu_emulation.mutated MISTAKE ARGUMENTS...: as npu_emulation.serve, with a mistake."""

from __future__ import annotations

import sys
from typing import Any

import torch
from sglang.srt.hardware_backend.npu.graph_runner.npu_cudagraph_backend import NPUCudaGraphBackend
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)

from npu_emulation import serve


def stale_lengths() -> None:
    """A graph is updated with the lengths it has."""
    update = torch.npu.NPUGraph.update

    def ignoring(graph: Any, cpu_update_input: list[dict[str, Any]]) -> None:
        update(graph, [{} for _ in cpu_update_input])

    torch.npu.NPUGraph.update = ignoring


def no_wait_for_results() -> None:
    """A decode step's tokens are read before their copy to the host was waited for."""
    process = SchedulerBatchResultProcessor.process_batch_result_decode

    def unwaited(processor: Any, batch: Any, result: Any) -> None:
        result.copy_done = None
        process(processor, batch, result)

    SchedulerBatchResultProcessor.process_batch_result_decode = unwaited


def no_wait_before_update() -> None:
    """A graph's lengths are updated while its last replay may still read them."""
    replay = NPUCudaGraphBackend.replay_with_input_update

    def unfenced(backend: Any, *args: Any, **kwargs: Any) -> Any:
        backend._rebind_fence = None
        return replay(backend, *args, **kwargs)

    NPUCudaGraphBackend.replay_with_input_update = unfenced


MISTAKES = {
    mistake.__name__: mistake
    for mistake in (stale_lengths, no_wait_for_results, no_wait_before_update)
}

if __name__ == "__main__":
    MISTAKES[sys.argv.pop(1)]()
    serve.main()
