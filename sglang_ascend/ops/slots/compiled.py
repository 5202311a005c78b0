"""The slot lists on CPU, in one compiled loop."""

from __future__ import annotations

import torch


def assign_slots(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    from sglang_ascend.ops.slots import kernels

    tensors = (req_to_token, req_pool_indices, starts, ends, slots)
    kernels.assign_slots(*(tensor.numpy() for tensor in tensors))
