"""The two models of a step, and the rows that they run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.ops.chain.reference import DraftDecodeInputs


@dataclass(frozen=True)
class Requests:
    """The running requests: their committed lengths, and where their KV slots are listed."""

    seq_lens: torch.Tensor  # int64 [batch], tokens in the target's cache
    req_pool_indices: torch.Tensor  # int [batch], row in req_to_token
    req_to_token: torch.Tensor  # int [rows, max_context_len], position -> slot
    max_kv_len: int  # host bound, at least seq_len + 2K of every request
    page_size: int = 1  # slots that are allocated together


@dataclass(frozen=True)
class Rows:
    """Where the rows of one forward stand. Each forward writes the KV slots of its rows."""

    positions: torch.Tensor  # int64 [rows]
    slots: torch.Tensor  # int64 [rows]
    metadata: StepMetadata  # what they attend to


class Forwards(Protocol):
    """The two models of a step."""

    def target(
        self, rows: Rows, tokens: torch.Tensor, requests: Requests
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, hidden states) of every row."""
        ...

    def mtp(
        self,
        rows: Rows,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        last_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, hidden states) of the MTP layer, one row per request: of ``last_rows``, flat
        row numbers, where a request has several."""
        ...

    def chain(
        self,
        ahead: DraftDecodeInputs,
        metadata: StepMetadata,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
    ) -> torch.Tensor | None:
        """The likeliest drafts of the MTP layer on its own output, int64 [K-1, batch], which begins
        with ``tokens`` and ``hidden``; None where its forwards are run one by one."""
        ...
