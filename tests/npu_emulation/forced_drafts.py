"""python -m npu_emulation.forced_drafts ARGUMENTS...: npu_emulation.serve, where the steps' K are
those of $FORCED_DRAFTS, which begins again, and --speculative-adaptive chooses none.

In the report each step has, beside the tokens before it and its accepted drafts, the drafts of its
chain and how many it verified. $MISTAKE names one to make. A float32 model has its experts in
float32 too.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch

from npu_emulation import serve
from npu_emulation.float32_experts import keep_float32
from npu_emulation.report import Report
from sglang_ascend.plugin.mtp.adaptive import skipped_rows
from sglang_ascend.plugin.mtp.adaptive.steps import AdaptiveSteps
from sglang_ascend.speculative.adaptive.controller import AdaptiveDrafts
from sglang_ascend.speculative.skipped import SkippedRows

Chain = tuple[int, int]  # drafts, and how many of them, the last one repeated, are verified


def force(schedule: list[int]) -> None:
    of_step, init = cycle(schedule), AdaptiveDrafts.__init__

    def begin(drafts: AdaptiveDrafts, *args: Any, **known: Any) -> None:
        init(drafts, *args, **known)
        drafts.in_force = schedule[0]  # whether the first prompts are skipped

    def choose(drafts: AdaptiveDrafts, *args: Any) -> int:
        drafts.in_force = next(of_step)
        return drafts.in_force

    AdaptiveDrafts.__init__, AdaptiveDrafts.choose = begin, choose


def record_chains() -> dict[str, list[Chain]]:
    """By request, in the order of its steps. Nothing is read from the device."""
    chains: dict[str, list[Chain]] = defaultdict(list)
    begin = AdaptiveSteps.begin

    def recorded(steps: AdaptiveSteps, batch: Any, *args: Any) -> tuple[int, int]:
        drafted = [steps.behind_prompts.get(req) for req in batch.reqs]
        in_chains = steps.in_chains
        verified, to_draft = begin(steps, batch, *args)
        for req, behind_prompt in zip(batch.reqs, drafted, strict=True):
            chains[req.rid].append(
                (in_chains if behind_prompt is None else behind_prompt, verified)
            )
        return verified, to_draft

    AdaptiveSteps.begin = recorded
    return chains


def not_caught_up() -> None:
    """What steps without drafts left out stays out of the MTP layer's cache."""
    skipped_rows.catch_up = lambda *args: None


def caught_up_with_tokens_of_others() -> None:
    """Each hidden state is kept with another row's token."""
    keep = SkippedRows.keep

    def mistaken(
        rows: SkippedRows, slots: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        keep(rows, slots, hidden, tokens.roll(1))

    SkippedRows.keep = mistaken


def never_forgotten() -> None:
    """Rows that the MTP layer runs itself count as skipped, as they were when their slots were."""
    SkippedRows.forget = lambda self, slots: None


def not_told_of_replays() -> None:
    """The host does not know that a replayed step has left the MTP layer out."""
    SkippedRows.were_kept = lambda self: None


MISTAKES: dict[str, Callable[[], None]] = {
    mistake.__name__: mistake
    for mistake in (
        not_caught_up,
        caught_up_with_tokens_of_others,
        never_forgotten,
        not_told_of_replays,
    )
}


def main() -> None:
    force([int(k) for k in os.environ["FORCED_DRAFTS"].split(",")])
    chains = record_chains()
    if mistake := os.environ.get("MISTAKE"):
        MISTAKES[mistake]()
    if "float32" in sys.argv:
        keep_float32()
    serve_one = serve.serve

    def with_chains(*args: Any) -> Report:
        report = serve_one(*args)
        # A step that was launched behind a request's last one is not counted.
        report.accepted = [
            [[*step, *chain] for step, chain in zip(steps, chains[str(number)], strict=False)]
            for number, steps in enumerate(report.accepted)
        ]
        return report

    serve.serve = with_chains
    serve.main()


if __name__ == "__main__":
    main()
