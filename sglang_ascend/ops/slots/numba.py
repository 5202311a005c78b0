"""The slot lists on CPU, in one compiled loop."""

from __future__ import annotations

import torch

from sglang_ascend.ops.numba_cache import njit


@njit
def _fill(req_to_token, req_pool_indices, starts, ends, slots):
    taken = 0
    for request in range(len(req_pool_indices)):
        row = req_pool_indices[request]
        for position in range(starts[request], ends[request]):
            if position >= req_to_token.shape[1]:
                raise IndexError("a request has more slots than its row of the slot table")
            req_to_token[row, position] = slots[taken]
            taken += 1


def assign_slots(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    tensors = (req_to_token, req_pool_indices, starts, ends, slots)
    _fill(*(tensor.numpy() for tensor in tensors))
