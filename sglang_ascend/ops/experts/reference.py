"""Definitions of the mixture-of-experts operators (DeepSeek-V3, arXiv 2412.19437, 2.1.2)."""

from __future__ import annotations

import torch


def gating(
    scores: torch.Tensor,
    bias: torch.Tensor,
    *,
    num_experts_per_token: int,
    num_groups: int,
    num_kept_groups: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each row, limited to the groups whose two best experts score highest.

        affinity = sigmoid(scores);  choice by affinity + bias;  weight by affinity alone

    Args:
        scores: float [rows, experts], the router's logits.
        bias: [experts] in the dtype of ``scores``, for load balance: it chooses, it does not weigh.
        num_groups: equal groups of neighbouring experts; 1 for no grouping.
        num_kept_groups: groups that a row may choose from.
        scale: of the weights, which sum to 1 before it.

    Returns:
        (weights [rows, k] in the dtype of ``scores``, expert ids int32 [rows, k]), k being
        ``num_experts_per_token``, the highest choice first. Does not synchronise.
    """
    affinity = scores.float().sigmoid()
    choice = (affinity + bias.float()).unflatten(1, (num_groups, -1))
    best_of_group = choice.topk(2, dim=-1).values.sum(dim=-1)
    kept = best_of_group.topk(num_kept_groups, dim=-1).indices
    is_kept = torch.zeros_like(best_of_group, dtype=torch.bool).scatter(1, kept, True)
    choice = choice.masked_fill(~is_kept[..., None], -torch.inf).flatten(1)
    experts = choice.topk(num_experts_per_token, dim=-1).indices
    weights = affinity.gather(1, experts)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * scale
    return weights.to(scores.dtype), experts.int()


def permute(
    x: torch.Tensor, experts: torch.Tensor, *, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A copy of each row for each of its experts, grouped by expert.

    Args:
        x: [rows, width].
        experts: int32 [rows, k], each in 0..num_experts - 1.

    Returns:
        (copies [rows * k, width], by expert and then by row;
        int32 [rows * k], where the copy of row i for its j-th expert went, at i * k + j;
        int64 [num_experts], copies of each expert). Does not synchronise.
    """
    flat = experts.flatten().long()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return x[order // experts.shape[1]], places.int(), counts


def grouped_matmul(x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The rows of each group by the group's own matrix.

    Args:
        x: float [rows, in_width], group by group.
        weights: [groups, in_width, out_width] in the dtype of ``x``.
        counts: int64 [groups], rows of each; their sum is rows.

    Returns:
        [rows, out_width] in the dtype of ``x``. This body reads ``counts`` on the host; an
        implementation for a device must not.
    """
    groups = zip(x.split(counts.tolist()), weights, strict=True)
    return torch.cat([rows @ weight for rows, weight in groups])


def unpermute(copies: torch.Tensor, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The weighted sum of what the experts made of each row: the inverse of ``permute``.

    Args:
        copies: float [rows * k, width], in the order of ``permute``.
        weights: [rows, k] in the dtype of ``copies``; on a CPU float32 too.
        places: int32 [rows * k], as ``permute`` gave them.

    Returns:
        [rows, width] in the dtype of ``copies``, summed in float32. Does not synchronise.
    """
    of_row = copies[places.long()].view(*weights.shape, -1).float()
    return (of_row * weights.float()[..., None]).sum(dim=1).to(copies.dtype)
