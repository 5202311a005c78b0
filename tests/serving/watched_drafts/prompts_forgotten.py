"""The MTP layer's cache of every prompt is emptied behind its prefill: a part of a server.

A decode server that is sent such a cache drafts as if no cache had arrived.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def prefill(original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``MTPDraftWorker._draft_extend_for_prefill``."""
    slots = batch.out_cache_loc
    drafted = original(worker, batch, *args, **kwargs)
    pool = worker.draft_runner.token_to_kv_pool
    latent = hasattr(pool, "kv_buffer")
    for rows in pool.kv_buffer if latent else (*pool.k_buffer, *pool.v_buffer):
        rows[slots] = 0
    return drafted


def install() -> None:
    target = "sglang_ascend.plugin.mtp.draft_worker.MTPDraftWorker._draft_extend_for_prefill"
    HookRegistry.register(target, prefill, HookType.AROUND)
