"""Drafts with one mistake, which changes no token of a reply: a part of a server.

A file named mistake in the folder $ACCEPTANCE names it, while there is one.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ascend.ops.chain.reference import DraftDecodeInputs
from sglang_ascend.speculative.forwards import Rows

Input = tuple[Rows, torch.Tensor]
FILE = Path(os.environ["ACCEPTANCE"]) / "mistake"
PADDING = 0  # the slot that belongs to no request


def hidden_of_the_row_before(rows: Rows, hidden: torch.Tensor, is_first: bool) -> Input:
    """Behind the accepted tokens, each is paired with the state of one that it does not follow."""
    return rows, hidden.roll(1, 0) if is_first else hidden


def position_of_the_row_before(rows: Rows, hidden: torch.Tensor, is_first: bool) -> Input:
    """On its own output the layer is a position too early."""
    return rows if is_first else replace(rows, positions=rows.positions - 1), hidden


def keys_not_written(rows: Rows, hidden: torch.Tensor, is_first: bool) -> Input:
    """Of accepted tokens the layer's cache holds what was there before."""
    nowhere = replace(rows, slots=torch.full_like(rows.slots, PADDING))
    return nowhere if is_first else rows, hidden


def not_caught_up(rows: Rows, hidden: torch.Tensor, is_first: bool) -> Input:
    """Of what was decoded without drafts too, which an MTP layer is shown one row at a time, and a
    draft model in rows of any number."""
    nowhere = replace(rows, slots=torch.full_like(rows.slots, PADDING))
    return nowhere if is_first and rows.metadata.query_len in (1, None) else rows, hidden


def history_off_by_one(rows: Rows, hidden: torch.Tensor, is_first: bool) -> Input:
    """Of the lookup, which record_lookups makes; the MTP layer makes none."""
    return rows, hidden


def context_of_another_request(rows: Rows, hidden: torch.Tensor, is_first: bool) -> Input:
    """Of the tokens that each request may draft beside a list; the MTP layer makes none."""
    return rows, hidden


MISTAKES = {
    mistake.__name__: mistake
    for mistake in (
        hidden_of_the_row_before,
        position_of_the_row_before,
        keys_not_written,
        not_caught_up,
        history_off_by_one,
        context_of_another_request,
    )
}


def mtp(original: Any, self: Any, rows: Rows, tokens: Any, hidden: Any, last_rows: Any = None):
    """Around ``MTPForwards.mtp``."""
    if FILE.exists():
        mistake = MISTAKES[FILE.read_text()]
        rows, hidden = mistake(rows, hidden, is_first=last_rows is not None)
    return original(self, rows, tokens, hidden, last_rows)


def chain(
    original: Any, self: Any, ahead: DraftDecodeInputs, metadata: Any, tokens: Any, hidden: Any
) -> Any:
    """Around ``MTPForwards.chain``, all of whose rows are on the layer's own output."""
    if FILE.exists():
        rows = Rows(ahead.positions, ahead.slots, metadata)
        rows, hidden = MISTAKES[FILE.read_text()](rows, hidden, is_first=False)
        ahead = replace(ahead, positions=rows.positions, slots=rows.slots)
    return original(self, ahead, metadata, tokens, hidden)


def choose(original: Any, lists: Any, *args: Any) -> None:
    """Around ``RequestLists._choose``."""
    original(lists, *args)
    if FILE.exists() and FILE.read_text() == context_of_another_request.__name__:
        batch = lists.batch
        lists.batch = replace(batch, places=(batch.places + 1) % batch.batch_size)


def install() -> None:
    lists = "sglang_ascend.plugin.requests.draft_heads.lists.RequestLists"
    HookRegistry.register(f"{lists}._choose", choose, HookType.AROUND)
    forwards = "sglang_ascend.plugin.mtp.forwards.MTPForwards"
    HookRegistry.register(f"{forwards}.mtp", mtp, HookType.AROUND)
    HookRegistry.register(f"{forwards}.chain", chain, HookType.AROUND)
