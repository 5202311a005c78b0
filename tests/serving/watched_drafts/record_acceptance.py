"""Writes down how many drafts of each request were accepted in each step: a part of a server.

$ACCEPTANCE names a folder. Each scheduler process appends to a file of its own in it, before the
reply is sent, a line for each request and step: the request's id, its tokens in the cache after the
step, the drafts accepted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

COUNTED = "sglang.srt.managers.schedule_batch.Req.update_spec_correct_drafts_histogram"


def record(original: Any, req: Any, num_accepted: int) -> None:
    original(req, num_accepted)
    with (Path(os.environ["ACCEPTANCE"]) / f"{os.getpid()}.steps").open("a") as file:
        file.write(f"{req.rid} {req.kv.kv_committed_len} {num_accepted}\n")


def install() -> None:
    HookRegistry.register(COUNTED, record, HookType.AROUND)
