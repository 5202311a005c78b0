"""An adaptive server that can be told to draft a fixed number, whatever it has learnt of itself.

$FIXED_DRAFTS names a file with that K; while it is empty the server chooses by itself. What it then
predicts for the batch it runs, S(B,0), S(B,1), ..., is written beside it, as .predicted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ascend.speculative.adaptive.controller import AdaptiveDrafts

FILE = Path(os.environ["FIXED_DRAFTS"])
PREDICTED = FILE.with_suffix(".predicted")
STEPS = "sglang_ascend.plugin.mtp.adaptive.steps.AdaptiveSteps"
STEPS_BETWEEN_REPORTS = 8


class FixedDrafts(AdaptiveDrafts):
    """Chooses K, and learns nothing."""

    def __init__(self, max_drafts: int, num_drafts: int) -> None:
        super().__init__(max_drafts)
        self.in_force = num_drafts

    def choose(self, *args: Any) -> int:
        return self.in_force

    def start_anew(self, *args: Any) -> None: ...
    def record_time(self, *args: Any) -> None: ...
    def record_acceptance(self, *args: Any) -> None: ...


class Switch:
    """In place of a server's policy, as the file says before each prefill."""

    def __init__(self) -> None:
        self.learning: AdaptiveDrafts | None = None
        self.num_steps = 0

    def prefill(self, original: Any, adaptive: Any, *args: Any) -> Any:
        """Around ``AdaptiveSteps.prefill``."""
        if self.learning is None:
            self.learning = adaptive.policy
        told = FILE.read_text()
        most = self.learning.max_drafts
        adaptive.policy = FixedDrafts(most, int(told)) if told else self.learning
        return original(adaptive, *args)

    def begin(self, original: Any, adaptive: Any, batch: Any, *args: Any) -> tuple[int, int]:
        """Around ``AdaptiveSteps.begin``."""
        chosen = original(adaptive, batch, *args)
        self.num_steps += 1
        if adaptive.policy is self.learning and self.num_steps % STEPS_BETWEEN_REPORTS == 0:
            context = sum(req.kv.kv_committed_len for req in batch.reqs) / len(batch.reqs)
            predicted = adaptive.policy.speedups(len(batch.reqs), context)
            PREDICTED.write_text(json.dumps(predicted))
        return chosen


def install() -> None:
    switch = Switch()
    HookRegistry.register(f"{STEPS}.prefill", switch.prefill, HookType.AROUND)
    HookRegistry.register(f"{STEPS}.begin", switch.begin, HookType.AROUND)
