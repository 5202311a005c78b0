"""Which functions of this package a decode step executes: a part of a benchmark server.

$STEP_FUNCTIONS names the file that gets, when the server is idle, a list for each decode step.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from function_trace import FunctionTrace
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


class StepTraces:
    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def trace(self, original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Around ``MTPWorker.forward_batch_generation``."""
        if not batch.forward_mode.is_decode():
            return original(worker, batch, *args, **kwargs)
        with FunctionTrace() as trace:
            result = original(worker, batch, *args, **kwargs)
        self.steps.append(list(trace.functions))
        return result

    def flush(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """After ``Scheduler.on_idle``."""
        if self.steps:
            path = Path(os.environ["STEP_FUNCTIONS"])
            path.with_suffix(".part").write_text(json.dumps(self.steps))
            path.with_suffix(".part").rename(path)
            self.steps = []
        return result


def install() -> None:
    traces = StepTraces()
    worker = "sglang_ascend.plugin.mtp.worker.MTPWorker"
    HookRegistry.register(f"{worker}.forward_batch_generation", traces.trace, HookType.AROUND)
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.on_idle", traces.flush, HookType.AFTER)
