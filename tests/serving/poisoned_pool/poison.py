"""A KV pool in which every slot that no request owns is poisoned, and a watch on all of them.

A part of a server (benchmarks/server_parts). A step that reads a slot it does not own computes with
1e30 and says other tokens; one that writes such a slot is reported to $POISON_REPORT. $KV_RESERVE
"in tree" gives a step SGLang's own reserve in place of ours: the control.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ascend.plugin.mtp_algorithm import MTPAlgorithm

POISON = 1e30
# The padding slot, which belongs to nobody: unallocated positions are pointed at it.
PADDING = 0
WORKER = "sglang_ascend.plugin.mtp_worker.MTPWorker.forward_batch_generation"


class Watch:
    def __init__(self) -> None:
        self.steps = self.written = 0
        self.path = Path(os.environ["POISON_REPORT"])

    def step(self, original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return original(worker, batch, *args, **kwargs)
        nobodys = self.poison(worker, batch)
        result = original(worker, batch, *args, **kwargs)
        self.steps += 1
        for cache in caches(worker):
            self.written += int((cache[nobodys] != POISON).flatten(1).any(dim=1).sum())
        return result

    def poison(self, worker: Any, batch: Any) -> torch.Tensor:
        """Slots that no request and no cached prefix owns, all of them poisoned."""
        allocator = batch.token_to_kv_pool_allocator
        page = torch.arange(allocator.page_size)
        pages = allocator.free_pages
        if allocator.page_size > 1:
            free = (pages[:, None] * allocator.page_size + page).reshape(-1)
        else:
            free = pages
        nobodys = torch.cat([torch.tensor([PADDING]), free.long()])
        for cache in caches(worker):
            cache[nobodys] = POISON
        rows = batch.req_to_token_pool.req_to_token
        for row, req in zip(batch.req_pool_indices.tolist(), batch.reqs, strict=True):
            rows[row, req.kv.kv_allocated_len :] = PADDING
        return nobodys

    def report(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """After ``Scheduler.on_idle``."""
        record = {"steps": self.steps, "written": self.written}
        self.path.with_suffix(".part").write_text(json.dumps(record))
        self.path.with_suffix(".part").rename(self.path)
        return result


def caches(worker: Any) -> list[torch.Tensor]:
    """Every layer's cache of target and MTP layer, [slots, ...]."""
    found = []
    for runner in (worker.target_worker.model_runner, worker.draft_worker.draft_runner):
        pool = runner.token_to_kv_pool
        for name in ("k_buffer", "v_buffer", "kv_buffer"):
            found += getattr(pool, name, None) or []
    return found


def install() -> None:
    watch = Watch()
    HookRegistry.register(WORKER, watch.step, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.on_idle", watch.report, HookType.AFTER
    )
    if os.environ["KV_RESERVE"] == "in tree":
        MTPAlgorithm.resolve_max_speculative_num_draft_tokens = (
            CustomSpecAlgo.resolve_max_speculative_num_draft_tokens
        )
