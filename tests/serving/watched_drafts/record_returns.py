"""Writes down what returns from a retraction on a decode server, and begins with no draft: a part.

Each process appends to a file of its own in the folder $ACCEPTANCE the request's id, its tokens in
the cache, and 0 drafts in a chain of K repetitions.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

FILE = Path(os.environ["ACCEPTANCE"]) / f"{os.getpid()}.returns"


def received(original: Any, batch: Any, *args: Any) -> Any:
    """Around ``received_draft_input``."""
    drafts = original(batch, *args)
    returned = [req for req in batch.reqs if len(req.output_ids) > 1]
    starts = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in returned]
    num_drafts = drafts.topk_index.shape[1] - 1
    with FILE.open("a") as file:
        for req, start in zip(returned, starts, strict=True):
            file.write(f"{req.rid} {start} 0 {num_drafts}\n")
    return drafts


def install() -> None:
    target = "sglang_ascend.plugin.mtp.algorithm.received_draft_input"
    HookRegistry.register(target, received, HookType.AROUND)
