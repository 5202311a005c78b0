"""How far a speculative step writes into its requests' KV slots, seen in the caches themselves.

A part of a server (benchmarks/server_parts). Before a step, every slot that it may not read is
poisoned: those that nobody owns, and each request's own from its committed length on. What the step
leaves other than poison, it wrote. $WATCHED_POOL is a folder: report.json gets the sums of every
reserve when the server is idle; a file named reserve, where there is one, replaces the reserve.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

POISON = 1e30
# The padding slot, which belongs to nobody. Positions without a slot are pointed at it.
PADDING = 0
BEYOND = 4  # positions, more than a reserve is shortened by
WORKER = "sglang_ascend.plugin.mtp.worker.MTPWorker.forward_batch_generation"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
REQUESTS = "sglang_ascend.plugin.mtp.forwards.requests_of"
RESERVE = "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode"
FOLDER = Path(os.environ["WATCHED_POOL"])


@dataclass
class Sums:
    """Over the decode steps with one reserve."""

    steps: int = 0
    unseen: int = 0  # requests of a step whose own writes did not reach where they must
    min_spare: int = 1 << 30  # slots allocated past the last one needed, of the tightest request


class Watch:
    def __init__(self) -> None:
        self.sums: dict[int, Sums] = {}

    def step(self, original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return original(worker, batch, *args, **kwargs)
        sums = self.sums.setdefault(allocation_sizing.get_alloc_reserve_per_decode(), Sums())
        layers, table = caches(worker), batch.req_to_token_pool.req_to_token
        starts, rows = batch.seq_lens.tolist(), batch.req_pool_indices.tolist()
        owned = []
        for row, start, req in zip(rows, starts, batch.reqs, strict=True):
            allocated = req.kv.kv_allocated_len
            owned.append(table[row, start:allocated].long())
            table[row, allocated:] = PADDING
        nobodys = slots_of_nobody(batch.token_to_kv_pool_allocator)
        for layer in layers:
            layer[torch.cat([nobodys, *owned])] = POISON
        result = original(worker, batch, *args, **kwargs)
        if result.extra_keep_alive_refs == [None]:
            return result  # the step behind the last one of a reply is left out, and writes nothing
        sums.steps += 1
        ends, num_steps = result.new_seq_lens.tolist(), worker.speculative_num_steps
        for start, end, slots in zip(starts, ends, owned, strict=True):
            # The rows verified, or the drafts decoded behind the accepted ones; caches must agree.
            needed = max(num_steps + 1, end - start + num_steps - 1)
            sums.min_spare = min(sums.min_spare, len(slots) - needed)
            reached = written(layers, slots).nonzero()
            sums.unseen += len(reached) == 0 or int(reached[-1]) + 1 != min(needed, len(slots))
        return result

    def report(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """After ``Scheduler.on_idle``."""
        part = FOLDER / "report.part"
        part.write_text(json.dumps({n: asdict(sums) for n, sums in self.sums.items()}))
        part.rename(FOLDER / "report.json")
        return result


def slots_of_nobody(allocator: Any) -> torch.Tensor:
    """The padding slot and the free ones, int64."""
    pages = allocator.get_all_free_pages().long()
    if allocator.page_size > 1:
        pages = (pages[:, None] * allocator.page_size + torch.arange(allocator.page_size)).flatten()
    return torch.cat([torch.tensor([PADDING]), pages])


def written(layers: list[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """bool [slots]: no longer poison in one layer or more."""
    changed = torch.zeros(len(slots), dtype=torch.bool)
    for layer in layers:
        changed |= (layer[slots] != POISON).flatten(1).any(dim=1)
    return changed


def caches(worker: Any) -> list[torch.Tensor]:
    """Every layer's cache of target and MTP layer, [slots, ...]; there must be some of each."""
    found = []
    for runner in (worker.target_worker.model_runner, worker.draft_worker.draft_runner):
        pool = runner.token_to_kv_pool
        layers = [getattr(pool, name, None) for name in ("k_buffer", "v_buffer", "kv_buffer")]
        assert any(layers), f"{type(pool).__name__} keeps its cache elsewhere"
        found += chain.from_iterable(buffers for buffers in layers if buffers)
    return found


def chosen_reserve(original: Callable[[], int]) -> int:
    chosen = FOLDER / "reserve"
    return int(chosen.read_text()) if chosen.is_file() else original()


def farther(requests: Any, *args: Any) -> Any:
    """Of ``requests_of``: a step that reaches too far finds the padding slot there."""
    return replace(requests, max_kv_len=requests.max_kv_len + BEYOND)


def install() -> None:
    watch = Watch()
    HookRegistry.register(WORKER, watch.step, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.on_idle", watch.report, HookType.AFTER)
    HookRegistry.register(REQUESTS, farther, HookType.AFTER)
    HookRegistry.register(RESERVE, chosen_reserve, HookType.AROUND)
