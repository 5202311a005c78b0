"""The K of every step of an adaptive server is given, and what each step verifies is written down.

$FORCED_DRAFTS is "random", "apart" (each process draws by itself), or the K of step 1, 2, ...,
which begins again at its end. With $ACCEPTANCE each process appends to a file of its own there, for
each request and step, the request's id, its tokens in the cache before it, the drafts of its chain,
and the chain's length with the repetitions at its end (which record_lookups does where lookups are
on); to another one the K that it chose.
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
schedule = cycle([] if GIVEN in ("random", "apart") else map(int, GIVEN.split(",")))


def choose(drafts: AdaptiveDrafts, *args: Any) -> int:
    chosen = next(schedule, None)
    if chosen is None:
        chosen = rng.randint(0, drafts.max_drafts)
    # A prompt that comes next is skipped where this is 0.
    drafts.in_force = chosen
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
    if "ACCEPTANCE" in os.environ and "record_lookups" not in os.environ["BENCHMARK_PARTS"]:
        target = "sglang_ascend.plugin.mtp.adaptive.steps.AdaptiveSteps.begin"
        HookRegistry.register(target, begin, HookType.AROUND)
