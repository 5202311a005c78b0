"""The step on more requests than a batch has: of as many as another rank's."""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang_ascend.speculative.forwards import Requests
from sglang_ascend.speculative.step import Phases


class PaddedPhases:
    """``Phases`` of a batch that is made up to ``size`` by requests without tokens.

    As in a captured step, they stand in row 0 of the slot table, which no request owns, and write
    to slot 0. What they give is left out.
    """

    def __init__(self, phases: Phases, size: int) -> None:
        self.phases, self.size = phases, size

    def prepare(self, candidates: torch.Tensor, requests: Requests) -> torch.Tensor:
        self.num_rows = candidates.numel()
        made_up = replace(
            requests,
            seq_lens=self._fill(requests.seq_lens),
            req_pool_indices=self._fill(requests.req_pool_indices),
            # They write 2K positions of their own.
            max_kv_len=max(requests.max_kv_len, 2 * candidates.shape[1]),
        )
        return self.phases.prepare(self._fill(candidates), made_up)[: self.num_rows]

    def verify(self) -> torch.Tensor:
        return self.phases.verify()[: self.num_rows]

    @property
    def hidden(self) -> torch.Tensor:
        return self.phases.hidden[: self.num_rows]

    def draft(
        self, sampled: torch.Tensor, accept_lens: torch.Tensor, new_seq_lens: torch.Tensor
    ) -> torch.Tensor:
        drafted = self.phases.draft(
            self._fill(sampled), self._fill(accept_lens, 1), self._fill(new_seq_lens, 1)
        )
        return drafted[: len(sampled)]

    def _fill(self, of_requests: torch.Tensor, value: int = 0) -> torch.Tensor:
        shape = (self.size - len(of_requests), *of_requests.shape[1:])
        return torch.cat([of_requests, of_requests.new_full(shape, value)])
