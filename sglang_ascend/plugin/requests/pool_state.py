"""What is known of each running request, kept on the device in its row of the request pool."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class PoolState(ABC):
    """State that begins with a request's prompt and advances with the tokens that it emits.

    On the device, because the host learns of a step's tokens after the next step is launched.
    """

    @abstractmethod
    def restart(self, reqs: list[Req], rows: torch.Tensor) -> None:
        """Requests begin, or begin again with what they had emitted, in ``rows`` (int [requests])
        of the pool."""

    @abstractmethod
    def advance(self, rows: torch.Tensor, tokens: torch.Tensor, num_kept: torch.Tensor) -> None:
        """The first ``num_kept`` (int [batch]) of ``tokens`` (int64 [batch, width]) are emitted."""

    def prefill(self, batch: ScheduleBatch) -> None:
        """Before the forward of prompts; rows of a mixed chunk bring their last emitted token."""
        self.restart(*prompts_of(batch))
        if num_decoding := len(batch.decoding_reqs or ()):
            rows, tokens = batch.req_pool_indices[-num_decoding:], batch.input_ids[-num_decoding:]
            self.advance(rows, tokens[:, None], torch.ones_like(rows))


def prompts_of(batch: ScheduleBatch) -> tuple[list[Req], torch.Tensor]:
    """The requests of a prefill whose prompts it has, and their rows of the pool, int [requests];
    behind them come those of a mixed chunk that decode."""
    num_prompts = len(batch.reqs) - len(batch.decoding_reqs or ())
    return batch.reqs[:num_prompts], batch.req_pool_indices[:num_prompts]
