"""Where steps end their chains: what each step verifies is written down.

In the folder $ACCEPTANCE each process appends to a file of its own, for each request and step, the
request's id, its tokens in the cache before it, the drafts of its chain, and how long that was
verified, its end repeated.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

FOLDER = Path(os.environ["ACCEPTANCE"])


def begin(original: Any, ended: Any, batch: Any) -> int:
    """Around ``EndedChains.begin``."""
    verified = original(ended, batch)
    rows = zip(batch.reqs, batch.seq_lens.tolist(), batch.req_pool_indices.tolist(), strict=True)
    with (FOLDER / f"{os.getpid()}.chains").open("a") as file:
        for req, start, row in rows:
            file.write(f"{req.rid} {start} {ended.lengths[row]} {verified}\n")
    return verified


def install() -> None:
    target = "sglang_ascend.plugin.mtp.adaptive.lengths.EndedChains.begin"
    HookRegistry.register(target, begin, HookType.AROUND)
