"""The choice of experts on CPU, in one compiled loop, which is kept on disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_ascend.ops.numba_cache import njit
from sglang_ascend.ops.numba_floats import FLOATS, array_at, exp, narrow, widen


def accepts_scores(scores: torch.Tensor, bias: torch.Tensor, **sizes: Any) -> bool:
    """float32 or bfloat16, contiguous."""
    return (
        scores.dtype in FLOATS
        and scores.dtype == bias.dtype
        and scores.is_contiguous()
        and bias.is_contiguous()
    )


def gating(
    scores: torch.Tensor,
    bias: torch.Tensor,
    *,
    num_experts_per_token: int,
    num_groups: int,
    num_kept_groups: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_experts = scores.shape
    weights = scores.new_empty(num_rows, num_experts_per_token)
    experts = torch.empty(num_rows, num_experts_per_token, dtype=torch.int32)
    choose_experts(
        (scores.data_ptr(), bias.data_ptr(), weights.data_ptr(), experts.data_ptr()),
        (num_rows, num_experts, num_experts_per_token, num_groups, num_kept_groups),
        scale,
        FLOATS[scores.dtype],
    )
    return weights, experts


@njit(nogil=True, error_model="numpy")
def choose_experts(addresses, sizes, scale, element):
    num_rows, num_experts, k, num_groups, num_kept_groups = sizes
    scores = array_at(addresses[0], (num_rows, num_experts), element)
    bias = array_at(addresses[1], (num_experts,), element)
    weights = array_at(addresses[2], (num_rows, k), element)
    experts = array_at(addresses[3], (num_rows, k), np.int32(0))
    size = num_experts // num_groups
    affinity = np.empty(num_experts, np.float32)
    choice = np.empty(num_experts, np.float32)
    of_group = np.empty(num_groups, np.float32)
    for row in range(num_rows):
        for e in range(num_experts):
            affinity[e] = np.float32(1) / (np.float32(1) + exp(-widen(scores[row, e])))
            choice[e] = affinity[e] + widen(bias[e])
        for g in range(num_groups):
            first = second = np.float32(-np.inf)
            for value in choice[g * size : (g + 1) * size]:
                first, second = max(first, value), max(second, min(first, value))
            of_group[g] = first + second
        for _ in range(num_groups - num_kept_groups):
            least = _last_least(of_group)
            of_group[least] = np.inf
            choice[least * size : (least + 1) * size] = -np.inf
        total = np.float32(0)
        for j in range(k):
            best = np.argmax(choice)
            choice[best] = -np.inf
            experts[row, j] = best
            total += affinity[best]
        factor = np.float32(scale) / (total + np.float32(1e-20))
        for j in range(k):
            weights[row, j] = narrow(affinity[experts[row, j]] * factor, element)


@njit(error_model="numpy")
def _last_least(values):
    """Of equal groups the first are kept."""
    found = 0
    for i in range(1, len(values)):
        if values[i] <= values[found]:
            found = i
    return found
