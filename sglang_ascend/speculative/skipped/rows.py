"""What the MTP layer has not seen: rows that were decoded without drafts, until it is asked."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# Rows of one forward that catches up.
MAX_ROWS = 2048
NOT_SKIPPED = -1  # in place of a token

# Drafts nothing, but fills the cache, of rows (request, position): given int64 [n, 2] of these in
# order, and their slots, tokens and hidden states.
RunRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class SkippedRows:
    """Of every KV slot that was skipped the target's hidden state and the next token.

    The keys and values of the MTP layer's one decoder layer come from the row itself and from no
    other row. So rows are caught up in any order, each as a request of one token, and a slot that
    requests share, in the radix cache, once.

    ``rows_depend``: a draft model of several layers has them from all rows before. What it skipped
    of a request is then all that lies behind some position, for it goes on behind what was caught
    up only; so rows are caught up in order.
    """

    def __init__(
        self,
        num_slots: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        clock: Callable[[], float] = time.perf_counter,
        rows_depend: bool = False,
    ) -> None:
        self.rows_depend = rows_depend
        self.hidden = torch.empty(num_slots, hidden_size, dtype=dtype, device=device)
        self.next_tokens = torch.full((num_slots,), NOT_SKIPPED, device=device)
        self.any_kept = False  # since the start: a prompt may begin with slots that were skipped
        self.is_behind = False  # the running requests have skipped rows
        self.seconds_per_row = 0.0
        self._clock = clock

    def keep(
        self, slots: torch.Tensor, hidden: torch.Tensor | None, next_tokens: torch.Tensor
    ) -> None:
        """The rows of a forward after which nothing is drafted; no state where none is read."""
        if self.hidden.shape[1]:
            assert hidden is not None
            self.hidden[slots] = hidden
        self.next_tokens[slots] = next_tokens
        self.were_kept()

    def were_kept(self) -> None:
        """The host's part of ``keep``, which the replay of a captured one leaves out."""
        self.any_kept = self.is_behind = True

    def forget(self, slots: torch.Tensor) -> None:
        """The MTP layer runs on these rows itself."""
        if self.any_kept:
            self.next_tokens[slots] = NOT_SKIPPED

    def begin_anew(self) -> None:
        """What was kept so far was of no request: it lies in slot 0."""
        self.any_kept = self.is_behind = False

    def slots_of(self, slot_table: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """Which of the first ``lens`` positions of each request were skipped, int64 [n, 2] of
        (request, position). Waits for the device."""
        positions = torch.arange(slot_table.shape[1], device=slot_table.device)
        is_skipped = self.next_tokens[slot_table] != NOT_SKIPPED
        return (is_skipped & (positions < lens[:, None])).nonzero()

    def seconds_to_catch_up(self, slot_table: torch.Tensor, lens: torch.Tensor) -> float:
        if not self.is_behind:
            return 0.0
        return len(self.slots_of(slot_table, lens)) * self.seconds_per_row

    def catch_up(self, slot_table: torch.Tensor, lens: torch.Tensor, run: RunRows) -> None:
        """Runs the MTP layer on what it skipped of the first ``lens`` positions of each request.

        ``slot_table`` int64 [batch, max_len] is the slot of every position.
        """
        begun = self._clock()
        skipped = self.slots_of(slot_table, lens)
        if len(skipped) == 0:
            return
        all_slots = slot_table[skipped[:, 0], skipped[:, 1]]
        # All before any is forgotten: requests share slots.
        all_tokens = self.next_tokens[all_slots]
        parts = (rows.split(MAX_ROWS) for rows in (skipped, all_slots, all_tokens))
        for rows, slots, tokens in zip(*parts, strict=True):
            run(rows, slots, tokens, self.hidden[slots])
        self.forget(all_slots)
        each = (self._clock() - begun) / len(skipped)
        self.seconds_per_row = min(self.seconds_per_row or each, each)


def slots_of_pages(block_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Slot of every position of a table of pages."""
    if page_size == 1:
        return block_table
    within = torch.arange(page_size, device=block_table.device)
    return (block_table[..., None] * page_size + within).flatten(1)
