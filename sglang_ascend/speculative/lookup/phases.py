"""The step's phases where chains may be looked up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_ascend.speculative.forwards import Requests
from sglang_ascend.speculative.lookup.choice import Cost
from sglang_ascend.speculative.lookup.drafts import LookupDrafts
from sglang_ascend.speculative.step import LaunchedPhases


class LookupPhases:
    """``Phases`` whose next chains are looked up where that is worth more than drafting them.

    Where it is for every request, the MTP layer does not run. ``drawn_from`` fills as that layer
    drafts: of each draft the distribution that it was drawn from, [batch, vocab_size].
    """

    def __init__(
        self,
        phases: LaunchedPhases,
        drafts: LookupDrafts,
        cost: Cost,
        drawn_from: Sequence[torch.Tensor] = (),
    ) -> None:
        self.phases, self.drafts, self.cost = phases, drafts, cost
        self.drawn_from = drawn_from

    def prepare(self, candidates: torch.Tensor, requests: Requests) -> torch.Tensor:
        # Once lengths are published the batch is the scheduler's again.
        self._rows = requests.req_pool_indices.clone()
        self._last_tokens = candidates[:, 0]
        return self.phases.prepare(candidates, requests)

    def verify(self) -> torch.Tensor:
        return self.phases.verify()

    @property
    def hidden(self) -> torch.Tensor:
        return self.phases.hidden

    def _num_mtp_drafts(self) -> int:
        """What a lookup stands beside; how soon a chain ends is known once it is drafted."""
        most = self.phases.num_drafts
        if self.phases.is_unlikely is None:
            return most
        return min(most, round(self.drafts.usual_drafts))

    def draft(
        self, sampled: torch.Tensor, accept_lens: torch.Tensor, new_seq_lens: torch.Tensor
    ) -> torch.Tensor:
        self.drafts.accept(self._rows, self._last_tokens, sampled, accept_lens)
        found = self.drafts.propose(self._rows, self._num_mtp_drafts(), self.cost)
        if bool(found.is_chosen.all()):
            self.phases.num_drafts = 0
        drafted = self.phases.draft(sampled, accept_lens, new_seq_lens)
        self.drafts.were_drafted(self._rows, drafted.shape[1] - 1)
        for probs in self.drawn_from:
            # What is verified in their place was drawn from nothing.
            probs[found.is_chosen] = 0.0
        return found.instead_of(drafted)
