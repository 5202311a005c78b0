"""Definition of writing the slot lists of the running requests."""

from __future__ import annotations

import torch


def assign_slots(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Writes ``slots`` into positions [start, end) of each request's row, in place.

    Args:
        req_to_token: int [rows, max_context_len], position -> KV slot.
        req_pool_indices: int [batch], row of each request.
        starts, ends: int [batch], positions; a request may get none.
        slots: int [sum(end - start)] or more, request-major.

    Synchronises on a device (the number of slots is data); SGLang calls it there in its own form.
    """
    lengths = (ends - starts).long()
    rows = req_pool_indices.long().repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    within = torch.arange(len(rows), device=rows.device) - first.repeat_interleave(lengths)
    columns = starts.long().repeat_interleave(lengths) + within
    req_to_token[rows, columns] = slots[: len(rows)].to(req_to_token.dtype)
