"""Writes down how many drafts of each request were accepted in each step: a part of a server.

$ACCEPTANCE names a folder. Each scheduler process appends to a file of its own in it, before the
reply is sent, a line for each request and step: the request's id, its tokens in the cache after the
step, the drafts accepted. To another one, as record_returns does, of each first chain that was left
as the prefill began it: the request's id, its tokens in the cache, 1 draft in a chain of K.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

COUNTED = "sglang.srt.managers.schedule_batch.Req.update_spec_correct_drafts_histogram"
COMPLETED = "sglang_ascend.plugin.mtp.adaptive.first_chains.FirstChains.complete"


def record(original: Any, req: Any, num_accepted: int) -> None:
    original(req, num_accepted)
    with (Path(os.environ["ACCEPTANCE"]) / f"{os.getpid()}.steps").open("a") as file:
        file.write(f"{req.rid} {req.kv.kv_committed_len} {num_accepted}\n")


def complete(original: Any, chains: Any, batch: Any) -> None:
    rows = zip(batch.reqs, batch.seq_lens.tolist(), strict=True)
    new = [(req.rid, start) for req, start in rows if req in chains.begun]
    before = batch.spec_info.topk_index
    original(chains, batch)
    if batch.spec_info.topk_index is before:
        with (Path(os.environ["ACCEPTANCE"]) / f"{os.getpid()}.returns").open("a") as file:
            file.writelines(f"{name} {start} 1 {before.shape[1] - 1}\n" for name, start in new)


def install() -> None:
    HookRegistry.register(COMPLETED, complete, HookType.AROUND)
    HookRegistry.register(COUNTED, record, HookType.AROUND)
