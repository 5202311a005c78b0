"""Where lookups are on: what each step verifies is written down, and a lookup can be mistaken.

In the folder $ACCEPTANCE each process appends to a file of its own, for each request and step, the
request's id, its tokens in the cache before it, the drafts of its chain, the longest chain of the
step, and 1 where it was looked up.
A file named mistake there may say "history_off_by_one". With $ALWAYS_LOOKUP a lookup is taken
wherever there is one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ascend.speculative.lookup.drafts import MTP, LookupDrafts

FOLDER = Path(os.environ["ACCEPTANCE"])
begun: list[Any] = []  # of each request of the step, what is written down of its chain


def begin(original: Any, lookups: Any, batch: Any) -> list[int]:
    """Around ``RequestLookups.begin``."""
    rows, drafts = batch.req_pool_indices, lookups.drafts
    columns = (batch.seq_lens, drafts.lengths[rows], drafts.is_lookup[rows].long())
    begun[:] = zip(batch.reqs, *(column.tolist() for column in columns), strict=True)
    return original(lookups, batch)


def prepare(original: Any, phases: Any, candidates: torch.Tensor, requests: Any) -> torch.Tensor:
    """Around ``LookupPhases.prepare``."""
    verified = candidates.shape[1] - 1
    with (FOLDER / f"{os.getpid()}.chains").open("a") as file:
        for req, start, length, is_lookup in begun:
            file.write(f"{req.rid} {start} {length} {verified} {is_lookup}\n")
    return original(phases, candidates, requests)


def propose(original: Any, drafts: LookupDrafts, rows: torch.Tensor, *args: Any) -> Any:
    """Around ``LookupDrafts.propose``."""
    file = FOLDER / "mistake"
    if not (file.exists() and file.read_text() == "history_off_by_one"):
        return original(drafts, rows, *args)
    drafts._lens[rows] -= 1
    proposal = original(drafts, rows, *args)
    drafts._lens[rows] += 1
    return proposal


def rates(original: Any, drafts: LookupDrafts, rows: Any, places: torch.Tensor) -> torch.Tensor:
    """Around ``LookupDrafts._rates``."""
    found = original(drafts, rows, places)
    return found.clamp_min(0.5) * (places != MTP) if "ALWAYS_LOOKUP" in os.environ else found


def install() -> None:
    target = "sglang_ascend.speculative.lookup.drafts.LookupDrafts"
    begins = "sglang_ascend.plugin.requests.lookups.RequestLookups.begin"
    prepares = "sglang_ascend.speculative.lookup.phases.LookupPhases.prepare"
    HookRegistry.register(begins, begin, HookType.AROUND)
    HookRegistry.register(prepares, prepare, HookType.AROUND)
    HookRegistry.register(f"{target}.propose", propose, HookType.AROUND)
    HookRegistry.register(f"{target}._rates", rates, HookType.AROUND)
