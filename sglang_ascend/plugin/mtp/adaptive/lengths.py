"""How long the chains of a server's requests are, where steps end them early."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_ascend import env
from sglang_ascend.plugin.mtp.ranks import decision_of_first_rank
from sglang_ascend.plugin.requests.unsettled import Unsettled
from sglang_ascend.speculative.lengths import UnlikelyChains


class EndedChains:
    """Of each row of the request pool the drafts of its chain, of which the longest of a batch
    says how many rows a step verifies."""

    def __init__(self, least: float, num_rows: int) -> None:
        self.is_unlikely = partial(UnlikelyChains, least, _agreed)
        self.lengths = [1] * num_rows
        self._unsettled = Unsettled[int]()  # the drafts that a step verifies

    def begin(self, batch: ScheduleBatch) -> int:
        """Drafts that this step verifies."""
        self._rows = batch.req_pool_indices.tolist()
        verified = max(self.lengths[row] for row in self._rows)
        self._unsettled.append(len(self._rows), verified)
        return verified

    def drafted(self, num_drafts: int) -> None:
        """The step that has begun drafted so many."""
        for row in self._rows:
            self.lengths[row] = num_drafts

    def begin_chains(self, rows: torch.Tensor, num_drafts: int) -> None:
        """So many are drafted behind the prompts of requests in these rows of the pool."""
        for row in rows.tolist():
            self.lengths[row] = num_drafts

    def settle(self, accepted: Sequence[int]) -> int:
        """The scheduler has the accepted drafts of the oldest step -> those that it verified."""
        return self._unsettled.settle(len(accepted)) or 0


def make_ended_chains(num_rows: int) -> EndedChains | None:
    """None where nobody asks for it."""
    least = env.DRAFT_P_MIN.get()
    return EndedChains(least, num_rows) if least > 0 else None


def _agreed(is_unlikely: bool) -> bool:
    """Every rank ends its chains where the first one does."""
    return bool(decision_of_first_rank(int(is_unlikely))[0])
