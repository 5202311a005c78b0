"""The mixture-of-experts operators by torch_npu's fused ones."""

from __future__ import annotations

import torch

SIGMOID, TOP_TWO_OF_GROUP = 1, 1
COUNTS_OF_EXPERTS = 1
ONE_RESULT, GROUPS_OF_ROWS = 2, 0
# The index of row i's j-th copy stands at i * k + j, as init_routing_v2 leaves it.
INDEX_BY_ROW = 2


def gating(
    scores: torch.Tensor,
    bias: torch.Tensor,
    *,
    num_experts_per_token: int,
    num_groups: int,
    num_kept_groups: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, experts, _ = torch.ops.npu.npu_moe_gating_top_k(
        scores,
        num_experts_per_token,
        bias=bias,
        k_group=num_kept_groups,
        group_count=num_groups,
        group_select_mode=TOP_TWO_OF_GROUP,
        norm_type=SIGMOID,
        routed_scaling_factor=scale,
    )
    return weights, experts


def accepts_scores(scores: torch.Tensor, bias: torch.Tensor, *, num_groups: int, **rest) -> bool:
    """At most 2,048 experts in groups of more than two."""
    return scores.shape[1] <= 2048 and scores.shape[1] // num_groups > 2


def permute(
    x: torch.Tensor, experts: torch.Tensor, *, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    copies, places, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        experts,
        active_num=experts.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=COUNTS_OF_EXPERTS,
        expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts],
    )
    return copies, places, counts


def grouped_matmul(x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    (product,) = torch.ops.npu.npu_grouped_matmul(
        [x],
        [weights],
        group_list=counts,
        group_list_type=COUNTS_OF_EXPERTS,
        split_item=ONE_RESULT,
        group_type=GROUPS_OF_ROWS,
    )
    return product


def unpermute(copies: torch.Tensor, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.ops.npu.npu_moe_finalize_routing(
        copies,
        skip1=None,
        skip2=None,
        bias=None,
        scales=weights,
        expanded_src_to_dst_row=places,
        export_for_source_row=None,
        drop_pad_mode=INDEX_BY_ROW,
    )
