"""Adaptive drafting on a server: what the policy is told of each step, and what it decides."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.server_args import ServerArgs

from sglang_ascend.plugin.mtp.adaptive.kept_costs import CostsFile, make_costs_file
from sglang_ascend.plugin.mtp.adaptive.skipped_rows import before_prefill, slot_table
from sglang_ascend.plugin.mtp.forwards import StepModels
from sglang_ascend.plugin.mtp.ranks import decision_of_first_rank, is_first_rank
from sglang_ascend.plugin.observability.step import make_clock, make_draft_gauge
from sglang_ascend.plugin.requests.lookups import RequestLookups
from sglang_ascend.plugin.requests.unsettled import Unsettled
from sglang_ascend.speculative.adaptive.beliefs import LookedUp
from sglang_ascend.speculative.adaptive.controller import AdaptiveDrafts
from sglang_ascend.speculative.lookup.choice import widths
from sglang_ascend.speculative.skipped import SkippedRows
from sglang_ascend.speculative.timeline import Clock

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Timed:
    """A step that verified what was drafted with its own K, or looked up, until the next begins."""

    began: Any  # a clock's mark
    requests: list[Req]
    context: float
    num_drafts: int
    verified: int


class _Ended(NamedTuple):
    """Such a step, whose time the clock may not know yet."""

    step: _Timed
    ended: Any
    drafted: int


@dataclass(frozen=True)
class _Drafted:
    """What a step's accepted drafts are recorded by."""

    num_drafts: int
    is_drafted: list[bool]  # of each request: a step of the MTP layer drafted its whole chain
    is_sampled: list[bool]


class AdaptiveSteps:
    """K of each step: how many drafts it verifies, and how many it drafts for the next one.

    A chain has the K that was chosen when it was drafted. A step that is to draft more verifies a
    chain that is as long, its end repeated, so that one set of constants serves.
    """

    def __init__(
        self,
        max_drafts: int,
        skipped: SkippedRows,
        clock: Clock,
        lookups: RequestLookups | None = None,
        on_change: Callable[[int], None] = lambda num_drafts: None,
        costs_file: CostsFile | None = None,
    ) -> None:
        costs = None if costs_file is None else costs_file.costs
        self.policy = AdaptiveDrafts(max_drafts, costs=costs)
        self.skipped, self.lookups, self._costs_file = skipped, lookups, costs_file
        self.in_chains = max_drafts
        # Drafts behind the prompts of requests that have made no step since.
        self.behind_prompts: WeakKeyDictionary[Req, int] = WeakKeyDictionary()
        self._on_change, self._clock = on_change, clock
        self._told: int | None = None
        self._tell(max_drafts)
        self._timed: _Timed | None = None
        self._unread = deque[_Ended]()
        self._unsettled = Unsettled[_Drafted]()
        self._costs: dict[tuple[int, int], int] = {}  # what ``cost`` tells

    def begin(self, batch: ScheduleBatch, looked_up: Sequence[int] = ()) -> tuple[int, int]:
        """(drafts that this step verifies, drafts that it drafts). Of each request's chain
        ``looked_up`` were, if any; a step may verify more because of them."""
        now, reqs = self._clock.mark(), list(batch.reqs)
        context = sum(req.kv.kv_committed_len for req in reqs) / len(reqs)
        timed, self._timed = self._timed, None
        if timed is not None and timed.requests == reqs:
            # It looked all up, and so drafted nothing.
            drafted = 0 if looked_up and all(looked_up) else timed.num_drafts
            self._unread.append(_Ended(timed, now, drafted))
        self._record_times()
        first: list[int | None] = [None] * len(reqs)
        if self.behind_prompts:
            first = [self.behind_prompts.pop(req, None) for req in reqs]
        is_sampled = [req.sampling_params.top_k != 1 for req in reqs]
        self.policy.share_sampled = sum(is_sampled) / len(is_sampled)
        self.policy.looked_up = self._worth_of(looked_up)
        before, drafted = self.policy.in_force, self._choose(batch, context, first)
        if self.policy.in_force != before:
            logger.info(
                "Drafts per step: %d -> %d (batch %d).", before, self.policy.in_force, len(reqs)
            )
        self._tell(drafted)
        if drafted == self.in_chains:
            self._timed = _Timed(now, reqs, context, drafted, max([drafted, *looked_up]))
        others = looked_up or [0] * len(first)
        is_drafted = [
            drafts is None and length == 0 for drafts, length in zip(first, others, strict=True)
        ]
        self._unsettled.append(len(reqs), _Drafted(self.in_chains, is_drafted, is_sampled))
        verified = max(self.in_chains, drafted)
        self.in_chains = drafted
        if self.lookups is not None:
            self._tell_costs(len(reqs), context, drafted, self.lookups.drafts.most_drafts)
        return verified, drafted

    def cost(self, verified: int, drafted: int) -> float:
        """Of a step behind this one, for what it chooses."""
        return self._costs[verified, drafted]

    def _tell(self, num_drafts: int) -> None:
        if num_drafts != self._told:
            self._on_change(num_drafts)
        self._told = num_drafts

    def _tell_costs(self, batch_size: int, context: float, drafted: int, most: int) -> None:
        """Every rank chooses by what the first one has measured."""
        steps = [(drafted, drafted)]
        steps += [(width, of_mtp) for width in widths(drafted, most) for of_mtp in {0, drafted}]
        load = self.policy.costs.of(batch_size, context)
        nanoseconds = [
            round(1e9 * load.hopeful_seconds((of_mtp, width))) for width, of_mtp in steps
        ]
        self._costs = dict(zip(steps, decision_of_first_rank(*nanoseconds), strict=True))

    def _record_times(self) -> None:
        """Of the steps that are known by now to have ended."""
        while self._unread:
            step, ended, drafted = self._unread[0]
            moments = self._clock.seconds((step.began, ended))
            if moments is None:
                return
            self._unread.popleft()
            began, ended = moments
            self.policy.record_time(
                len(step.requests), step.context, drafted, ended - began, step.verified
            )
            if self._costs_file is not None:
                self._costs_file.step()

    def _worth_of(self, looked_up: Sequence[int]) -> LookedUp | None:
        if self.lookups is None or not any(looked_up):
            return None
        share = sum(map(bool, looked_up)) / len(looked_up)
        return LookedUp(share, self.lookups.drafts.kept, max(looked_up))

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
        step = self._unsettled.settle(len(accepted))
        if step is None or step.num_drafts == 0:
            return 0
        counted = [i for i, is_drafted in enumerate(step.is_drafted) if is_drafted]
        self.policy.record_acceptance(
            [accepted[i] for i in counted], step.num_drafts, [step.is_sampled[i] for i in counted]
        )
        return step.num_drafts

    def prefill(self, batch: ScheduleBatch, models: StepModels) -> SkippedRows | None:
        """Before a prefill -> what takes its rows, where the MTP layer is not to see them yet.

        Else what its prompts begin with is caught up, and the rest is the prefill's.
        """
        self._timed = None
        for req in batch.reqs:
            self.behind_prompts[req] = self.policy.in_force
        if self.policy.in_force == 0:
            return self.skipped
        before_prefill(self.skipped, batch, models)
        return None

    def _seconds_to_catch_up(self, batch: ScheduleBatch) -> float:
        if not self.skipped.is_behind:
            return 0.0  # to ask for slots would wait for the device
        return self.skipped.seconds_to_catch_up(slot_table(batch, batch.seq_lens), batch.seq_lens)


def make_adaptive(
    max_drafts: int, skipped: SkippedRows, lookups: RequestLookups | None, server_args: ServerArgs
) -> AdaptiveSteps:
    """Raises StartupRefused where a file of costs is asked for and of no use."""
    costs_file = make_costs_file(server_args) if is_first_rank() else None
    return AdaptiveSteps(max_drafts, skipped, make_clock(), lookups, make_draft_gauge(), costs_file)
