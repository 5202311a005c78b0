"""What MTP's worker changes of the target that it is given, an object and not SGLang's class."""

from __future__ import annotations

from typing import Any

from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.npu.models import leave_norm_to_the_gate
from sglang_ascend.plugin.requests.seeds import SeededSampler
from sglang_ascend.plugin.requests.weight_updates import follow_weight_updates


def prepare_target(target_worker: Any, draft_runner: Any) -> None:
    """Rows are drawn by seeds, weight updates are followed, gates are called as each CANN takes it,
    and only the step is captured."""
    target_worker.model_runner.sampler = SeededSampler()
    follow_weight_updates(target_worker.model_runner)
    follow_weight_updates(draft_runner, target_worker.model_runner)
    if device_profile().keeps_ascend_path:
        leave_norm_to_the_gate(target_worker.model_runner.model)
        leave_norm_to_the_gate(draft_runner.model)
    if device_profile().captures_step:
        _leave_decode_to_the_step(target_worker)


def _leave_decode_to_the_step(target_worker: Any) -> None:
    """The target is captured with its step, and not a second time for a runner of its own."""
    capture, runner = target_worker.init_cuda_graphs, target_worker.model_runner

    def init_cuda_graphs(capture_decode_cuda_graph: bool = True) -> None:
        capture(capture_decode_cuda_graph=False)
        runner.decode_cuda_graph_runner, runner.decode_cuda_graph_captured = None, False

    target_worker.init_cuda_graphs = init_cuda_graphs
