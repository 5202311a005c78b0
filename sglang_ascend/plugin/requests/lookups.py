"""Drafts by prompt lookup on a server: its requests' tokens, and what is told of each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_ascend import env
from sglang_ascend.plugin.observability.step import make_lookup_counts
from sglang_ascend.plugin.requests.pool_state import PoolState
from sglang_ascend.plugin.requests.unsettled import Unsettled
from sglang_ascend.speculative.acceptance_counts import AcceptanceCounts
from sglang_ascend.speculative.lookup.drafts import LookupDrafts


class RequestLookups(PoolState):
    """Which chains of a step were looked up, and how long they are."""

    def __init__(self, drafts: LookupDrafts, counts: AcceptanceCounts | None) -> None:
        self.drafts, self._counts = drafts, counts
        # Of each request the tokens that were looked up; 0: the MTP layer drafted.
        self._unsettled = Unsettled[list[int]]()

    def before_prefill(self, batch: ScheduleBatch, num_drafts: int) -> None:
        """So many are drafted behind the prompts."""
        self.prefill(batch)
        self.drafts.begin_chains(batch.req_pool_indices, num_drafts)

    def restart(self, reqs: list[Req], rows: torch.Tensor) -> None:
        for req, row in zip(reqs, rows.tolist(), strict=True):
            self.drafts.restart(row, [*req.origin_input_ids, *req.output_ids])

    def advance(self, rows: torch.Tensor, tokens: torch.Tensor, num_kept: torch.Tensor) -> None:
        self.drafts.extend(rows, tokens[:, 0])

    def begin(self, batch: ScheduleBatch) -> list[int]:
        """Of each request the drafts of this step that were looked up; 0: the MTP layer drafted."""
        rows = batch.req_pool_indices
        lengths = self.drafts.lengths[rows].tolist()
        are_lookups = self.drafts.is_lookup[rows].tolist()
        looked_up = [
            length if is_lookup else 0
            for length, is_lookup in zip(lengths, are_lookups, strict=True)
        ]
        self._unsettled.append(len(looked_up), looked_up)
        return looked_up

    def settle(self, accepted: Sequence[int]) -> list[int]:
        """The scheduler has the accepted drafts of the oldest step -> those of the MTP layer."""
        looked_up = self._unsettled.settle(len(accepted))
        return [] if looked_up is None else self._count(accepted, looked_up)

    def _count(self, accepted: Sequence[int], looked_up: Sequence[int]) -> list[int]:
        pairs = list(zip(accepted, looked_up, strict=True))
        of_lookups = [kept for kept, length in pairs if length]
        if self._counts is not None:
            self._counts.record(of_lookups, max(looked_up))
        return [kept for kept, length in pairs if not length]


def make_lookups(num_steps: int, target_worker: Any) -> RequestLookups | None:
    """None where nobody asks for them. A chain is as long as the MTP layer's, or longer."""
    asked = env.LOOKUP_DRAFTS.get()
    if asked == 0:
        return None
    most_drafts = max(asked, num_steps)
    num_rows, max_len = target_worker.model_runner.req_to_token_pool.req_to_token.shape
    drafts = LookupDrafts(num_rows, max_len, most_drafts)
    return RequestLookups(drafts, make_lookup_counts(most_drafts))
