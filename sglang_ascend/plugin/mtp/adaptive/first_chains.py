"""The first chain of each request: a prefill owns no slots behind its prompt, so it drafts one
token, and the request's first step drafts the others before it verifies."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.runtime_context import get_disagg
from sglang.srt.speculative.eagle_info import EagleDraftInput

from sglang_ascend.plugin.mtp.adaptive.chains import Chains
from sglang_ascend.plugin.mtp.forwards import (
    MTPForwards,
    StepModels,
    ranks_share_rows,
    requests_of,
)
from sglang_ascend.plugin.mtp.sampling.batch import SamplingParts
from sglang_ascend.speculative.lengths import lengthened
from sglang_ascend.speculative.skipped import SkippedRows
from sglang_ascend.speculative.step import LaunchedPhases, StepConstants

# Of a batch, that must be new. Drafts 2 and 3 save a new request some 0.4 steps, and all of the
# batch waits for two forwards of the MTP layer, 0.03 to 0.05 steps each on a CPU: an estimate.
LEAST_SHARE = 1 / 8


class FirstChains:
    """Those that a prefill on this server has begun. Their drafts are the likeliest tokens, so that
    rejection sampling judges them as certain, as it does draft 1.

    A chain repeats draft 1 where few requests of the batch are new, and where ranks hold a part of
    a forward's rows each: all would have to enter the forwards of one that has a new request.

    ``constants`` are those of every length of a chain; ``chains`` is told how long these are.
    """

    def __init__(
        self,
        models: StepModels,
        parts: SamplingParts,
        constants: list[StepConstants],
        chains: Chains | None,
    ) -> None:
        self.models, self.parts, self.constants, self.chains = models, parts, constants, chains
        # What the MTP layer gave beside draft 1: its hidden state, and that draft's probability.
        self.begun: WeakKeyDictionary[Req, tuple[torch.Tensor, torch.Tensor]] = WeakKeyDictionary()

    def keep(self, reqs: list[Req], drafted: EagleDraftInput, skipped: SkippedRows | None) -> None:
        """Behind a prefill, whose rows ``skipped`` may have taken. Takes the hidden states away."""
        if get_disagg().disaggregation_mode == "prefill":  # they are part of what is sent
            return
        hidden, drafted.hidden_states = drafted.hidden_states, None
        if ranks_share_rows():
            return
        likelihood = drafted.topk_p[:, 0]
        if hidden is None:  # a separate model reads none
            hidden = likelihood
        for req, *given in zip(reqs, hidden, likelihood, strict=True):
            self.begun.pop(req, None)  # of an earlier chunk of the prompt
            if skipped is None:
                self.begun[req] = tuple(given)

    def complete(self, batch: ScheduleBatch) -> None:
        """Before the step of a batch some of whose requests may be new."""
        places = [i for i, req in enumerate(batch.reqs) if req in self.begun]
        if not places:
            return
        new = [batch.reqs[i] for i in places]
        given = [self.begun.pop(req) for req in new]
        if len(new) < LEAST_SHARE * len(batch.reqs):
            if self.chains is not None:
                self.chains.stay_begun(new)
            return
        num_drafts = self._num_drafts(new)
        if num_drafts < 2:
            return
        hidden, likelihood = map(torch.stack, zip(*given, strict=True))
        at, requests = torch.tensor(places, device=batch.device), requests_of(batch)
        rows = requests.req_pool_indices[at]
        requests = replace(requests, seq_lens=requests.seq_lens[at], req_pool_indices=rows)
        if self.parts.lists is not None:
            self.parts.lists.draft_for(rows)
        candidates = batch.spec_info.topk_index
        begun = candidates[at, :2]
        forwards = MTPForwards(self.models)
        phases = LaunchedPhases(
            forwards,
            self.parts.propose_likeliest,
            self.constants[num_drafts],
            at_once=self.parts.have_whole_head,
        )
        if self.chains is not None and self.chains.ended is not None:
            phases.is_unlikely = self.chains.ended.is_unlikely()
        phases.prepare(begun, requests)
        forwards.begin(phases.rows, begun.view(-1), requests)
        completed = phases.complete(hidden, likelihood)
        if self.chains is not None:
            self.chains.completed(rows, completed.shape[1] - 1)
        width = candidates.shape[1]
        batch.spec_info.topk_index = candidates.index_copy(0, at, lengthened(completed, width))

    def _num_drafts(self, new: list[Req]) -> int:
        if self.chains is None:
            return self.constants[-1].num_steps
        return max(self.chains.in_first_chain(req) for req in new)
