"""Adaptive drafting on a server: what the policy is told of each step, and what it decides."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.plugin.mtp.forwards import MTPForwards, StepModels
from sglang_ascend.plugin.observability.step import make_draft_gauge
from sglang_ascend.speculative.adaptive.controller import AdaptiveDrafts
from sglang_ascend.speculative.skipped import SkippedRows
from sglang_ascend.speculative.step import Requests, Rows, run_single_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Timed:
    """A step that verified and drafted the same K, until the next one begins."""

    moment: float
    requests: list[str]
    context: float
    num_drafts: int


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
        self._on_change = on_change
        self._timed: _Timed | None = None
        # Steps whose accepted drafts the scheduler has not told yet: batch size and drafts.
        self._unsettled: deque[tuple[int, int]] = deque()

    def begin(self, batch: ScheduleBatch) -> tuple[int, int]:
        """(drafts that this step verifies, drafts that it drafts)."""
        now, rids = time.perf_counter(), [req.rid for req in batch.reqs]
        context = sum(req.kv.kv_committed_len for req in batch.reqs) / len(rids)
        timed, self._timed = self._timed, None
        if timed is not None and timed.requests == rids:
            seconds = now - timed.moment
            self.policy.record_time(len(rids), timed.context, timed.num_drafts, seconds)
        before = self.policy.in_force
        drafted = self.policy.choose(len(rids), context, lambda: self._seconds_to_catch_up(batch))
        if self.policy.in_force != before:
            logger.info(
                "Drafts per step: %d -> %d (batch %d).", before, self.policy.in_force, len(rids)
            )
        if drafted != self.in_chains:
            self._on_change(drafted)
        else:
            self._timed = _Timed(now, rids, context, drafted)
        self._unsettled.append((len(rids), self.in_chains))
        verified = max(self.in_chains, drafted)
        self.in_chains = drafted
        return verified, drafted

    def settle(self, accepted: Sequence[int]) -> int:
        """The scheduler has the accepted drafts of the oldest step -> the K that it verified."""
        while self._unsettled:
            batch_size, num_drafts = self._unsettled.popleft()
            if batch_size == len(accepted):
                self.policy.record_acceptance(accepted, num_drafts)
                return num_drafts
        return 0

    def prefill(self, batch: ScheduleBatch, models: StepModels) -> None:
        """Before a prefill: what its prompts begin with is caught up, the rest is the prefill's."""
        self._timed = None
        if self.skipped.any_kept and any(batch.prefix_lens):
            lens = torch.tensor(batch.prefix_lens, device=batch.device)
            table, forwards = _slot_table(batch, lens), MTPForwards(models)
            # What is run are views of this batch, with rows of their own.
            rows = Rows(lens, lens, StepMetadata(table, lens, page_size=1, query_len=1))
            requests = Requests(lens, batch.req_pool_indices, table, max_kv_len=int(lens.max()))
            forwards.begin(rows, lens, requests)
            self.skipped.catch_up(table, lens, partial(run_single_rows, forwards))
        self.skipped.forget(batch.out_cache_loc)

    def _seconds_to_catch_up(self, batch: ScheduleBatch) -> float:
        return self.skipped.seconds_to_catch_up(_slot_table(batch, batch.seq_lens), batch.seq_lens)


def lengthened(candidates: torch.Tensor, width: int) -> torch.Tensor:
    """int64 [batch, width]: the last token repeated where a chain is shorter than the relay's row.

    As behind a prompt, verification drops the repetitions that are wrong.
    """
    missing = width - candidates.shape[1]
    if missing == 0:
        return candidates
    return torch.cat([candidates, candidates[:, -1:].expand(-1, missing)], dim=1)


def _slot_table(batch: ScheduleBatch, lens: torch.Tensor) -> torch.Tensor:
    table = batch.req_to_token_pool.req_to_token
    return table[batch.req_pool_indices, : int(lens.max())].long()


def make_adaptive(max_drafts: int, target_worker: Any) -> AdaptiveSteps:
    runner = target_worker.model_runner
    skipped = SkippedRows(
        runner.max_total_num_tokens + runner.page_size,
        runner.model_config.spec_hidden_size,
        runner.dtype,
        runner.device,
    )
    return AdaptiveSteps(max_drafts, skipped, make_draft_gauge())
