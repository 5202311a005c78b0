"""How long the chains of a server's steps are, and what drafts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.runtime_context import get_spec

from sglang_ascend.plugin.mtp.adaptive.lengths import EndedChains, make_ended_chains
from sglang_ascend.plugin.mtp.adaptive.skipped_rows import (
    before_prefill,
    before_replay,
    make_skipped,
)
from sglang_ascend.plugin.mtp.adaptive.steps import AdaptiveSteps, make_adaptive
from sglang_ascend.plugin.mtp.forwards import StepModels
from sglang_ascend.plugin.requests.lookups import RequestLookups, make_lookups
from sglang_ascend.speculative.lengths import lengthened
from sglang_ascend.speculative.lookup.choice import prior_cost
from sglang_ascend.speculative.lookup.phases import LookupPhases
from sglang_ascend.speculative.skipped import SkippedRows
from sglang_ascend.speculative.step import LaunchedPhases, Phases


@dataclass(frozen=True)
class Chains:
    """Where the operator asked for others than K drafts of the MTP layer for each step."""

    num_steps: int  # K
    num_rows: int  # of the longest chain, its first token included
    adaptive: AdaptiveSteps | None = None
    ended: EndedChains | None = None
    lookups: RequestLookups | None = None
    skipped: SkippedRows | None = None  # what steps without the MTP layer leave it

    def before_prefill(self, batch: ScheduleBatch, models: StepModels) -> SkippedRows | None:
        """What takes the rows of a prefill that leaves the MTP layer out."""
        left_out = None
        if self.adaptive is not None:
            left_out = self.adaptive.prefill(batch, models)
        elif self.skipped is not None:
            before_prefill(self.skipped, batch, models)
        num_drafts = int(left_out is None)
        if self.lookups is not None:
            self.lookups.before_prefill(batch, num_drafts)
        if self.ended is not None:
            self.ended.begin_chains(batch.req_pool_indices, num_drafts)
        return left_out

    def before_replay(self, batch: ScheduleBatch, models: StepModels, num_drafts: int) -> None:
        """Before a step of K = ``num_drafts`` that was captured."""
        if self.skipped is not None:
            before_replay(self.skipped, batch, models, num_drafts)

    def begin(self, batch: ScheduleBatch) -> tuple[int, int]:
        """(drafts that a step verifies, drafts that it drafts at most)."""
        verified = drafted = self.num_steps
        looked_up = [] if self.lookups is None else self.lookups.begin(batch)
        if self.adaptive is not None:
            verified, drafted = self.adaptive.begin(batch, looked_up)
        elif self.ended is not None:
            verified = self.ended.begin(batch)
        return max([verified, *looked_up]), drafted

    def in_first_chain(self, req: Req) -> int:
        """Drafts of the chain behind the request's prompt."""
        return self.num_steps if self.adaptive is None else self.adaptive.behind_prompts[req]

    def stay_begun(self, reqs: Sequence[Req]) -> None:
        """The chains behind their prompts have the one draft of the prefill."""
        if self.adaptive is not None:
            self.adaptive.behind_prompts.update(dict.fromkeys(reqs, 1))

    def completed(self, rows: torch.Tensor, num_drafts: int) -> None:
        """The chains behind prompts of requests in these rows of the pool have so many."""
        if self.lookups is not None:
            self.lookups.drafts.begin_chains(rows, num_drafts)
        if self.ended is not None:
            self.ended.begin_chains(rows, num_drafts)

    def phases(
        self, launched: LaunchedPhases, batch_size: int, drawn_from: Sequence[torch.Tensor]
    ) -> Phases:
        """Those of a step whose forwards are ``launched``, with the chains that it may look up."""
        launched.skipped = self.skipped
        if self.ended is not None:
            launched.is_unlikely = self.ended.is_unlikely()
        if self.lookups is None:
            return launched
        cost = prior_cost(batch_size) if self.adaptive is None else self.adaptive.cost
        return LookupPhases(launched, self.lookups.drafts, cost, drawn_from)

    def end(self, candidates: torch.Tensor) -> torch.Tensor:
        """A step's next candidates [batch, drafts + 1] -> as wide as the relay's."""
        if self.ended is not None:
            # Lookups may have made the chains wider.
            width = candidates.shape[1] - 1
            self.ended.drafted(width if self.lookups is None else self.lookups.drafts.num_drafted)
        if self.adaptive is not None and self.lookups is None:
            # A captured step drafts as many as it verifies, which may be more than were asked for.
            candidates = candidates[:, : self.adaptive.in_chains + 1]
        return lengthened(candidates, self.num_rows)

    def settle(self, accepted: Sequence[int]) -> tuple[Sequence[int], int]:
        """The scheduler has the accepted drafts of the oldest step -> (those of the MTP layer, how
        many it had drafted)."""
        num_drafts = self.num_steps
        if self.adaptive is not None:
            num_drafts = self.adaptive.settle(accepted)
        elif self.ended is not None:
            num_drafts = self.ended.settle(accepted)
        if self.lookups is not None:
            accepted = self.lookups.settle(accepted)
        return accepted, num_drafts


def make_chains(
    num_steps: int, num_rows: int, target_worker: Any, is_separate_model: bool
) -> Chains | None:
    """None where nobody asks for any."""
    lookups = make_lookups(num_steps, target_worker)
    ended = make_ended_chains(len(target_worker.model_runner.req_to_token_pool.req_to_token))
    is_adaptive = bool(get_spec().speculative_adaptive)
    if lookups is None and ended is None and not is_adaptive:
        return None
    if lookups is None and not is_adaptive:
        return Chains(num_steps, num_rows, ended=ended)
    skipped = make_skipped(target_worker, is_separate_model)
    server_args = target_worker.model_runner.server_args
    adaptive = make_adaptive(num_steps, skipped, lookups, server_args) if is_adaptive else None
    return Chains(num_steps, num_rows, adaptive, ended, lookups, skipped)
