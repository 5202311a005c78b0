"""Runs what drafts on rows that it skipped, to fill its cache."""

from __future__ import annotations

from functools import partial

import torch

from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.speculative.forwards import Forwards, Rows
from sglang_ascend.speculative.skipped.rows import SkippedRows


def catch_up(
    skipped: SkippedRows, forwards: Forwards, slot_table: torch.Tensor, lens: torch.Tensor
) -> None:
    """Fills the drafting model's cache of the first ``lens`` positions of each request."""
    run = run_in_order if skipped.rows_depend else run_single_rows
    skipped.catch_up(slot_table, lens, partial(run, forwards, slot_table))


def run_single_rows(
    forwards: Forwards,
    _: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
) -> None:
    """Each row as a request of one token, which sees itself; see ``skipped.RunRows``."""
    metadata = StepMetadata(slots[:, None], torch.ones_like(slots), page_size=1, query_len=1)
    _fill(forwards, rows[:, 1], slots, metadata, tokens, hidden)


def run_in_order(
    forwards: Forwards,
    slot_table: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
) -> None:
    """Rows of a request, which follow one another, behind all that it has before them."""
    requests, counts = rows[:, 0].unique_consecutive(return_counts=True)
    kv_lens = rows[counts.cumsum(0) - 1, 1] + 1
    metadata = StepMetadata(
        slot_table[requests, : int(kv_lens.max())],
        kv_lens,
        page_size=1,
        ragged_query_lens=tuple(counts.tolist()),
        ragged_kv_lens=tuple(kv_lens.tolist()),
    )
    _fill(forwards, rows[:, 1], slots, metadata, tokens, hidden)


def _fill(
    forwards: Forwards,
    positions: torch.Tensor,
    slots: torch.Tensor,
    metadata: StepMetadata,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
) -> None:
    # Of the head one row is asked, and not used.
    forwards.mtp(Rows(positions, slots, metadata), tokens, hidden, slots.new_zeros(1))
