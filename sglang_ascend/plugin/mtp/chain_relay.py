"""What one step hands to the next through SGLang's FutureMap: the next rows to verify."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.runtime_context import get_spec

from sglang_ascend.speculative.drawn import DrawnDrafts


class ChainRelay(FutureMap):
    """One buffer row per request, [last emitted token, draft 1, ..., draft K] in global ids.

    Core's relay keeps four buffers (token, probability, draft, hidden state); the chain is
    drafted before the step ends, so nothing but tokens has to survive it. Rejection sampling adds
    what the drafts were drawn from.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        shape = (self.req_pool_size, get_spec().speculative_num_draft_tokens)
        self.candidates = torch.zeros(shape, dtype=torch.int64, device=self.device)
        num_steps = get_spec().speculative_num_steps
        self.drawn = DrawnDrafts(self.req_pool_size, num_steps, self.device)
        # Core gathers the last emitted token from here for the decode rows of a mixed chunk.
        self.output_tokens_buf = self.candidates[:, 0]

    def stash(self, future_indices: torch.Tensor, payload: RelayPayload) -> None:
        if len(future_indices) == 0:
            return
        if payload.topk_index is None:
            self.stash_bonus_tokens(future_indices, payload.bonus_tokens)
            return
        self.candidates[future_indices] = payload.topk_index
        self.drawn.keep(future_indices, payload.draft_probs)

    def _resolve_spec_extras(self, batch: Any) -> None:
        draft_input = batch.spec_info
        # A batch of prefill alone has no spec_info.
        if draft_input is not None and len(draft_input.future_indices):
            draft_input.topk_index = self.candidates[draft_input.future_indices]
            draft_input.drawn_from = partial(self.drawn.of, draft_input.future_indices)
