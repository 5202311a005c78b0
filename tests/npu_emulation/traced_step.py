"""python -m npu_emulation.traced_step ARGUMENTS...: as npu_emulation.serve, and $STEP_FUNCTIONS
gets the functions of this package that MTP's step executes, when captured and when replayed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from function_trace import FunctionTrace

from npu_emulation import serve, serving
from sglang_ascend.plugin.mtp import step_graphs
from sglang_ascend.plugin.mtp import worker as mtp_worker

_EXECUTED: dict[str, list[str]] = {}


def _traced(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    with FunctionTrace() as trace:
        result = function(*args, **kwargs)
    _EXECUTED[name] = list(trace.functions)
    Path(os.environ["STEP_FUNCTIONS"]).write_text(json.dumps(_EXECUTED))
    return result


def main() -> None:
    step, capture = mtp_worker.MTPWorker.forward_batch_generation, step_graphs.capture_steps

    def traced_step(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_decode():
            return step(worker, batch, *args, **kwargs)
        return _traced("replayed", step, worker, batch, *args, **kwargs)

    mtp_worker.MTPWorker.forward_batch_generation = traced_step
    step_graphs.capture_steps = lambda *args: _traced("captured", capture, *args)
    serving.calls_are_checked = lambda arguments: False  # that is no part of a step
    serve.main()


if __name__ == "__main__":
    main()
