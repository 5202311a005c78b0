"""Adaptive drafting on a server: what the policy is told of each step, and what it decides."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_ascend.plugin.mtp.adaptive.skipped_rows import before_prefill, make_skipped, slot_table
from sglang_ascend.plugin.mtp.forwards import StepModels
from sglang_ascend.plugin.mtp.ranks import decision_of_first_rank
from sglang_ascend.plugin.observability.step import make_draft_gauge
from sglang_ascend.speculative.adaptive.controller import AdaptiveDrafts
from sglang_ascend.speculative.skipped import SkippedRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Timed:
    """A step that verified and drafted the same K, until the next one begins."""

    moment: float
    requests: list[str]
    context: float
    num_drafts: int


@dataclass(frozen=True)
class _Unsettled:
    """A step whose accepted drafts the scheduler has not told yet."""

    num_drafts: int
    is_first: list[bool]  # of each request: a prefill began its chain
    is_sampled: list[bool]


class AdaptiveSteps:
    """K of each step: how many drafts it verifies, and how many it drafts for the next one.

    A chain has the K that was chosen when it was drafted. A step that is to draft more verifies a
    chain that is as long, its end repeated as behind a prompt, so that one set of constants serves.
    """

    def __init__(
        self,
        max_drafts: int,
        skipped: SkippedRows,
        on_change: Callable[[int], None] = lambda num_drafts: None,
    ) -> None:
        self.policy, self.skipped = AdaptiveDrafts(max_drafts), skipped
        self.in_chains = max_drafts
        # Drafts behind the prompts of requests that have made no step since.
        self.behind_prompts: WeakKeyDictionary[Req, int] = WeakKeyDictionary()
        self._on_change = on_change
        self._timed: _Timed | None = None
        self._unsettled: deque[_Unsettled] = deque()

    def begin(self, batch: ScheduleBatch) -> tuple[int, int]:
        """(drafts that this step verifies, drafts that it drafts)."""
        now, rids = time.perf_counter(), [req.rid for req in batch.reqs]
        context = sum(req.kv.kv_committed_len for req in batch.reqs) / len(rids)
        timed, self._timed = self._timed, None
        if timed is not None and timed.requests == rids:
            seconds = now - timed.moment
            self.policy.record_time(len(rids), timed.context, timed.num_drafts, seconds)
        first = [self.behind_prompts.pop(req, None) for req in batch.reqs]
        is_sampled = [req.sampling_params.top_k != 1 for req in batch.reqs]
        self.policy.share_sampled = sum(is_sampled) / len(is_sampled)
        before, drafted = self.policy.in_force, self._choose(batch, context, first)
        if self.policy.in_force != before:
            logger.info(
                "Drafts per step: %d -> %d (batch %d).", before, self.policy.in_force, len(rids)
            )
        if drafted != self.in_chains:
            self._on_change(drafted)
        else:
            self._timed = _Timed(now, rids, context, drafted)
        is_first = [drafts is not None for drafts in first]
        self._unsettled.append(_Unsettled(self.in_chains, is_first, is_sampled))
        verified = max(self.in_chains, drafted)
        self.in_chains = drafted
        return verified, drafted

    def _choose(self, batch: ScheduleBatch, context: float, first: list[int | None]) -> int:
        behind_prompts = [drafts for drafts in first if drafts is not None]
        if 2 * len(behind_prompts) >= len(first):
            # What was learnt of a batch of others says little of this one.
            self.policy.start_anew(len(first), context)
        if len(behind_prompts) == len(first):
            self.in_chains = max(behind_prompts)
        drafted = self.policy.choose(len(first), context, lambda: self._seconds_to_catch_up(batch))
        # Every rank holds the K in force too, which says whether the next prompt is skipped.
        drafted, self.policy.in_force = decision_of_first_rank(drafted, self.policy.in_force)
        return drafted

    def settle(self, accepted: Sequence[int]) -> int:
        """The scheduler has the accepted drafts of the oldest step -> the K that it verified."""
        while self._unsettled:
            step = self._unsettled.popleft()
            if len(step.is_first) == len(accepted):
                # Behind a prompt a chain repeats its one draft.
                counted = [i for i, is_first in enumerate(step.is_first) if not is_first]
                self.policy.record_acceptance(
                    [accepted[i] for i in counted],
                    step.num_drafts,
                    [step.is_sampled[i] for i in counted],
                )
                return step.num_drafts
        return 0

    def prefill(self, batch: ScheduleBatch, models: StepModels) -> SkippedRows | None:
        """Before a prefill -> what takes its rows, where the MTP layer is not to see them yet.

        Else what its prompts begin with is caught up, and the rest is the prefill's.
        """
        self._timed = None
        drafts_behind = int(self.policy.drafts_behind_prompts())
        for req in batch.reqs:
            self.behind_prompts[req] = drafts_behind
        if drafts_behind == 0:
            return self.skipped
        before_prefill(self.skipped, batch, models)
        return None

    def _seconds_to_catch_up(self, batch: ScheduleBatch) -> float:
        return self.skipped.seconds_to_catch_up(slot_table(batch, batch.seq_lens), batch.seq_lens)


def make_adaptive(max_drafts: int, target_worker: Any) -> AdaptiveSteps:
    return AdaptiveSteps(max_drafts, make_skipped(target_worker), make_draft_gauge())
