"""Counts what one decode step does outside the models: tensor operations, waits, preparations.

What Numba or NumPy computes is no tensor operation. The operators run as their references here, so
that they are counted, and a tensor that is handed to NumPy all the same is listed. Two things that
are done on a CPU alone are left out: what a step emitted is not read behind it (``EndedRequests``),
and one head drafts all requests, as on an NPU.

A part of a benchmark server (benchmarks/server_parts). $STEP_COUNTS names the file that gets one
record per decode step when the server is idle.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Without a kernel of their own on a device: views, and allocations that write nothing.
FREE = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh",
    "new_empty", "permute", "select", "slice", "split", "squeeze", "t", "transpose", "unbind",
    "unsqueeze", "view", "_unsafe_view", "_reshape_alias",
}  # fmt: skip
# They need a value, or a size that depends on one, on the host.
WAITING_OPERATIONS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}
WAITING_METHODS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__")
# The ways to NumPy and Numba, where no operation is counted; of a tensor on a device an error.
UNCOUNTED_METHODS = ("numpy", "__array__")


class OperationCount(TorchDispatchMode):
    """Names of the operations that ran, in ``operations``; of those that wait, in ``waits``; of
    what hands a tensor to NumPy, in ``uncounted``."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.waits: list[str] = []
        self.uncounted: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name not in FREE and not name.startswith("profiler::"):
            self.operations.append(name)
        indexes_by_mask = name == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITING_OPERATIONS or indexes_by_mask:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching_methods(self) -> Iterator[None]:
        """Methods that hand a value to the host are listed too: most leave no operation here."""
        lists = dict.fromkeys(WAITING_METHODS, self.waits)
        lists |= dict.fromkeys(UNCOUNTED_METHODS, self.uncounted)
        with ExitStack() as stack:
            for name, calls in lists.items():
                listed = self._listed(name, calls, getattr(torch.Tensor, name))
                stack.enter_context(mock.patch.object(torch.Tensor, name, listed))
            yield

    @staticmethod
    def _listed(name: str, calls: list[str], original: Callable[..., Any]) -> Callable[..., Any]:
        def listed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(tensor, *args, **kwargs)

        return listed


class StepCounts:
    """One record per decode step: what ``Scheduler.run_batch`` does, relay and worker."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.calls: Counter[str] = Counter()

    def run_batch(self, original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any):
        if not batch.forward_mode.is_decode():
            return original(scheduler, batch, *args, **kwargs)
        self.calls.clear()
        with OperationCount() as count, count.watching_methods():
            result = original(scheduler, batch, *args, **kwargs)
        self.records.append(
            {
                "batch": batch.batch_size(),
                "operations": dict(Counter(count.operations)),
                "waits": count.waits,
                "uncounted": count.uncounted,
                "calls": dict(self.calls),
            }
        )
        return result

    def counting(self, name: str) -> Callable[..., Any]:
        def count(original: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return original(*args, **kwargs)

        return count

    def flush(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """After ``Scheduler.on_idle``."""
        if self.records:
            path = Path(os.environ["STEP_COUNTS"])
            path.with_suffix(".part").write_text(json.dumps(self.records))
            path.with_suffix(".part").rename(path)
            self.records = []
        return result


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    note = "sglang_ascend.plugin.mtp.sampling.batch.EndedRequests.note"
    HookRegistry.register(note, lambda *_: None, HookType.AROUND)
    by_request = "sglang_ascend.plugin.mtp.draft_worker.MTPDraftWorker._drafts_by_request"
    HookRegistry.register(by_request, lambda *_: False, HookType.AROUND)

    from sglang_ascend.ops import chain, sampling, slots  # noqa: F401 - all that a step calls
    from sglang_ascend.ops.dispatch import OPS

    # What is counted is PyTorch: a compiled body on CPU is no tensor operation at all.
    for op in OPS.values():
        op._bodies["cpu"] = tuple(body for body in op.bodies("cpu") if not body.devices)
    counts = StepCounts()
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.run_batch", counts.run_batch, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.on_idle", counts.flush, HookType.AFTER)
    HookRegistry.register(
        "sglang_ascend.plugin.attention.backend.build_metadata",
        counts.counting("metadata built by the backend"),
        HookType.AROUND,
    )
    prepare, count = chain.prepare_step, counts.counting("metadata prepared by the step")
    chain.prepare_step = lambda *args: count(prepare, *args)
