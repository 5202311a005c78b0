"""The K of every step of an adaptive server is given, and what each step verifies is written down.

$FORCED_DRAFTS is "random", "apart" (each process draws by itself), or the K of step 1, 2, ...,
which begins again at its end; then prompts have each of these K in turn. With $ACCEPTANCE each
process appends to a file of its own there, for each request and step, the request's id, its tokens
in the cache before it, the drafts of its chain, and the chain's length with the repetitions at its
end (which record_lookups does where lookups are on); to another one the K that it chose.
"""

from __future__ import annotations

import os
import random
from itertools import cycle
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ascend.speculative.adaptive.controller import AdaptiveDrafts

GIVEN = os.environ["FORCED_DRAFTS"]
# Processes may be forked with this module in them.
rng = random.SystemRandom() if GIVEN == "apart" else random.Random(11)
of_steps = [] if GIVEN in ("random", "apart") else [int(k) for k in GIVEN.split(",")]
schedule = cycle(of_steps)


class OfPrompts:
    """K of the chains behind prompts that come between two steps, another one each time: they may
    come behind the same few of the scheduled steps always."""

    def __init__(self) -> None:
        self._turns = cycle(sorted(set(of_steps)))
        self._now = next(self._turns, None)
        self._came = False

    def prefill(self, original: Any, adaptive: Any, *args: Any) -> Any:
        """Around ``AdaptiveSteps.prefill``."""
        self._came = True
        return original(adaptive, *args)

    def before_step(self, chosen: int) -> int:
        """What prompts have that come behind a step of ``chosen`` drafts."""
        if self._came:
            self._now, self._came = next(self._turns, None), False
        return chosen if self._now is None else self._now


of_prompts = OfPrompts()


def choose(drafts: AdaptiveDrafts, *args: Any) -> int:
    chosen = next(schedule, None)
    if chosen is None:
        chosen = rng.randint(0, drafts.max_drafts)
    # A prompt that comes next is skipped where this is 0.
    drafts.in_force = of_prompts.before_step(chosen)
    if "ACCEPTANCE" in os.environ:
        write("chosen", f"{chosen}\n")
    return chosen


def begin(original: Any, adaptive: Any, batch: Any, *args: Any) -> tuple[int, int]:
    """Around ``AdaptiveSteps.begin``."""
    behind_prompts, in_chains = adaptive.behind_prompts, adaptive.in_chains
    drafted = [behind_prompts.get(req, in_chains) for req in batch.reqs]
    verified, to_draft = original(adaptive, batch, *args)
    for req, start, in_chain in zip(batch.reqs, batch.seq_lens.tolist(), drafted, strict=True):
        write("chains", f"{req.rid} {start} {in_chain} {verified}\n")
    return verified, to_draft


def write(kind: str, line: str) -> None:
    with (Path(os.environ["ACCEPTANCE"]) / f"{os.getpid()}.{kind}").open("a") as file:
        file.write(line)


def install() -> None:
    AdaptiveDrafts.choose = choose
    steps = "sglang_ascend.plugin.mtp.adaptive.steps.AdaptiveSteps"
    HookRegistry.register(f"{steps}.prefill", of_prompts.prefill, HookType.AROUND)
    if "ACCEPTANCE" in os.environ and "record_lookups" not in os.environ["BENCHMARK_PARTS"]:
        HookRegistry.register(f"{steps}.begin", begin, HookType.AROUND)
