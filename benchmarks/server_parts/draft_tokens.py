"""A server whose drafts can be told which tokens they may be, and the time of each draft phase.

$DRAFT_TOKENS names a file that says so: "whole", "list", "list + context", or the path of another
draft_vocabulary.json, whose list then drafts alone. Beside it, as .times, stands for each step the
time of its draft and verify phases in ms, and the tokens that one request's drafts could be.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ascend.plugin.requests.draft_heads.lists import DraftTokens, ListedHeads
from sglang_ascend.speculative.vocabulary.file import read_vocabulary

FILE = Path(os.environ["DRAFT_TOKENS"])
WHOLE, LIST, JOINED = "whole", "list", "list + context"


class Told:
    """What the file says, read before each request."""

    def __init__(self) -> None:
        self.tokens = JOINED
        self.verify_ms = 0.0
        self.batch: DraftTokens | None = None
        self.num_listed = 0

    def before_prefill(self, original: Any, lists: Any, batch: Any) -> None:
        """Around ``RequestLists.before_prefill``."""
        self.tokens = FILE.read_text()
        original(lists, batch)

    def apply(self, original: Any, heads: ListedHeads, layer: Any, x: torch.Tensor, *args: Any):
        """Around ``ListedHeads.apply``."""
        batch = self.batch = heads.lists.batch
        self.num_listed = heads.vocab_size
        if self.tokens == WHOLE:
            return heads._whole(x)
        alone = replace(batch, places=batch.places[:0], context=batch.context[:0])
        drafting = heads
        if self.tokens not in (LIST, JOINED):
            drafting = _with_list(heads, self.tokens)
        self.num_listed = len(drafting.token_ids[0])
        heads.lists.batch = batch if self.tokens == JOINED else alone
        try:
            return original(drafting, layer, x, *args)
        finally:
            heads.lists.batch = batch

    def verify(self, original: Any, phases: Any) -> Any:
        """Around ``LaunchedPhases.verify``."""
        begun = time.perf_counter()
        result = original(phases)
        self.verify_ms = 1e3 * (time.perf_counter() - begun)
        return result

    def draft(self, original: Any, phases: Any, *args: Any) -> Any:
        """Around ``LaunchedPhases.draft``."""
        begun = time.perf_counter()
        result = original(phases, *args)
        draft_ms = 1e3 * (time.perf_counter() - begun)
        with FILE.with_suffix(".times").open("a") as file:
            file.write(f"{draft_ms} {self.verify_ms} {self._num_active()}\n")
        return result

    def _num_active(self) -> float:
        if self.tokens != JOINED or self.batch is None:
            return self.num_listed
        own = set(zip(self.batch.places.tolist(), self.batch.context.tolist(), strict=True))
        return self.num_listed + len(own) / self.batch.batch_size


@cache
def _with_list(heads: ListedHeads, path: str) -> ListedHeads:
    vocabulary = read_vocabulary(Path(path).parent, heads.vocab_size)
    assert vocabulary is not None
    other = ListedHeads(heads.lists, vocabulary, heads.vocab_size, heads.target_head)
    method = heads.target_head.quant_method
    other.give_rows(type("Model", (), {"lm_head": type("Head", (), {"quant_method": method})}))
    return other


def install() -> None:
    told = Told()
    heads: dict[str, Callable[..., Any]] = {
        "plugin.requests.draft_heads.lists.RequestLists.before_prefill": told.before_prefill,
        "plugin.requests.draft_heads.lists.ListedHeads.apply": told.apply,
        "speculative.step.LaunchedPhases.verify": told.verify,
        "speculative.step.LaunchedPhases.draft": told.draft,
    }
    for name, around in heads.items():
        HookRegistry.register(f"sglang_ascend.{name}", around, HookType.AROUND)
