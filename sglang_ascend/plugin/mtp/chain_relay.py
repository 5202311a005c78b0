"""What one step hands to the next through SGLang's FutureMap: the next rows to verify."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.runtime_context import get_spec


class ChainRelay(FutureMap):
    """One buffer row per request, [last emitted token, draft 1, ..., draft K] in global ids.

    Core's relay keeps four buffers (token, probability, draft, hidden state); the chain is
    drafted before the step ends, so nothing but tokens has to survive it. Rejection sampling adds
    the distributions that the drafts were drawn from, and how many were: behind a prompt, in a
    chain that is longer than what was drafted, and where it was looked up, others stand that were
    not drawn.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        shape = (self.req_pool_size, get_spec().speculative_num_draft_tokens)
        self.candidates = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.draft_probs: torch.Tensor | None = None
        self.num_drawn = torch.zeros(self.req_pool_size, dtype=torch.int64, device=self.device)
        # Core gathers the last emitted token from here for the decode rows of a mixed chunk.
        self.output_tokens_buf = self.candidates[:, 0]

    def stash(self, future_indices: torch.Tensor, payload: RelayPayload) -> None:
        if len(future_indices) == 0:
            return
        if payload.topk_index is None:
            self.stash_bonus_tokens(future_indices, payload.bonus_tokens)
            return
        self.candidates[future_indices] = payload.topk_index
        drawn_from = payload.draft_probs
        if drawn_from is not None:
            if self.draft_probs is None:
                shape = (self.req_pool_size, get_spec().speculative_num_steps, drawn_from.shape[-1])
                self.draft_probs = torch.zeros(shape, device=self.device)
            self.draft_probs[future_indices, : drawn_from.shape[1]] = drawn_from
        if self.draft_probs is not None:
            self.num_drawn[future_indices] = 0 if drawn_from is None else drawn_from.shape[1]

    def _resolve_spec_extras(self, batch: Any) -> None:
        draft_input = batch.spec_info
        # A batch of prefill alone has no spec_info.
        if draft_input is not None and len(draft_input.future_indices):
            draft_input.topk_index = self.candidates[draft_input.future_indices]
            draft_input.drawn_from = partial(self.drawn_from, draft_input.future_indices)

    def drawn_from(self, indices: torch.Tensor, width: int) -> torch.Tensor | None:
        """float [batch, width, tokens that a draft can be]: 0 for drafts that were not drawn."""
        if self.draft_probs is None:
            return None
        probs = self.draft_probs[indices, :width]
        places = torch.arange(probs.shape[1], device=probs.device)
        probs.mul_((places < self.num_drawn[indices, None])[..., None])
        # A lookup may be longer than what the MTP layer drafts.
        return torch.nn.functional.pad(probs, (0, 0, 0, width - probs.shape[1]))
