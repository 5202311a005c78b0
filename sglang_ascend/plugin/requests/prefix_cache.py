"""The radix cache of a server whose keys are pairs of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import Req


def pair_with_last_token(
    insert: Callable[..., None], self: Any, req: Req, *, up_to: int, **kwargs: Any
) -> None:
    """Around ``UnifiedRadixCache.checkpoint_into_tree``: all committed slots of a reply are found.

    Slot i is found by tokens i and i+1. The reply's last token has no slot yet, but pairs with the
    one before it, whose slot SGLang leaves out: it cuts the tokens where the slots end.
    """
    num_tokens = len(req.origin_input_ids) + len(req.output_ids_through_stop)
    ends_with_slots = up_to == req.kv.kv_committed_len
    if self.tree_core.is_eagle and req.finished() and ends_with_slots and up_to < num_tokens:
        up_to += 1
    insert(self, req, up_to=up_to, **kwargs)
