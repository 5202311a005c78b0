"""Mixture of experts: the router's choice, tokens sorted by expert, products, their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from npu_emulation.goldens.quantized import SCALAR_TYPES, dynamic_quant, integers
from npu_emulation.goldens.registry import UnsupportedArgumentError, golden

SIGMOID = 1  # norm_type; otherwise softmax
SUM_OF_TOP_2 = 1  # group_select_mode; otherwise the maximum
COUNTS = 1  # expert_tokens_num_type and group_list_type; 0 is cumulative


@golden("npu::npu_moe_gating_top_k_softmax")
def moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, experts int32, rows int32), all [tokens, k]; a finished token's expert is none.

    rows[i, j] = j * tokens + i. The weights are of the softmax over all experts, not renormalised.
    """
    num_tokens, num_experts = x.shape
    weights, experts = x.float().softmax(-1).topk(k, -1)
    if finished is not None:
        experts = experts.masked_fill(finished[:, None], num_experts)
    rows = torch.arange(k)[None] * num_tokens + torch.arange(num_tokens)[:, None]
    return weights.to(x.dtype), experts.int(), rows.int()


@golden("npu::npu_moe_gating_top_k")
def moe_gating_top_k(
    x: Tensor,
    k: int,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(weights, experts int32), both [tokens, k], and probabilities [tokens, experts] if asked.

    The bias takes part in the choice only. Sigmoid weights are divided by their sum.
    """
    num_tokens, num_experts = x.shape
    probabilities = x.float().sigmoid() if norm_type == SIGMOID else x.float().softmax(-1)
    choice = probabilities if bias is None else probabilities + bias.float()
    if group_count > 1:
        groups = choice.view(num_tokens, group_count, -1)
        if group_select_mode == SUM_OF_TOP_2:
            scores = groups.topk(2, -1).values.sum(-1)
        else:
            scores = groups.amax(-1)
        kept = torch.zeros_like(scores, dtype=torch.bool)
        kept.scatter_(1, scores.topk(k_group, -1).indices, True)
        left_out = ~kept.repeat_interleave(num_experts // group_count, 1)
        choice = choice.masked_fill(left_out, -math.inf)
    experts = choice.topk(k, -1).indices
    weights = probabilities.gather(1, experts)
    if norm_type == SIGMOID or renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = weights * routed_scaling_factor
    return weights.to(x.dtype), experts.int(), probabilities if out_flag else None


@golden("npu::npu_moe_init_routing_v2")
def moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None = None,
    active_num: int = -1,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(rows by expert [tokens * k, H], their index int32, tokens of each expert int64, scales).

    The index of type 0 says for each (token, choice) its row, -1 if its expert is not active; of
    type 1 for each row its (token, choice). Rows behind the active ones are undefined, 0 here.
    """
    num_choices = expert_idx.shape[1]
    start, end = active_expert_range or (0, expert_num)
    experts = expert_idx.flatten().long()
    active = (experts >= start) & (experts < end)
    order = torch.where(active, experts, expert_num).argsort(stable=True)
    num_active = int(active.sum())
    if 0 < active_num < num_active:
        raise UnsupportedArgumentError("npu_moe_init_routing_v2 with fewer rows is not emulated.")
    if expert_tokens_num_type != COUNTS or quant_mode not in (-1, 1) or (scale is not None):
        raise UnsupportedArgumentError(
            "npu_moe_init_routing_v2 is emulated with counts, without scales or static ones."
        )
    rows = x[order // num_choices].clone()
    rows[num_active:] = 0
    if row_idx_type == 1:
        index = order
    else:
        index = torch.full_like(order, -1)
        index[order[:num_active]] = torch.arange(num_active)
    counts = experts[active].bincount(minlength=expert_num)[start:end]
    scales = None
    if quant_mode == 1:
        rows, scales = dynamic_quant(rows)
    return rows, index.int(), counts if expert_tokens_num_flag else None, scales


@golden("npu::npu_grouped_matmul")
def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    antiquant_scale: Sequence[Tensor] | None = None,
    antiquant_offset: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int = -1,
    group_list_type: int = 0,
    output_dtype: int | None = None,
) -> list[Tensor]:
    """One result: the rows of group g are x[rows of g] @ weight[g], times scale[g] and their own.

    Only rows grouped along M (group_type 0), x and the weights [groups, K, N] in one tensor each.
    int4 weights, eight to an int32, meet int8 rows as (x - 8) @ (weight * scale) + bias: the bias,
    8 * sum over K of weight * scale, is the caller's to compute (aclnnGroupedMatmulV5).
    Float rows meet (weight + antiquant_offset) * antiquant_scale, by channel or groups of K.
    """
    if group_type != 0 or group_list is None or len(x) != 1 or len(weight) != 1:
        raise UnsupportedArgumentError("npu_grouped_matmul is emulated with group_type=0 only.")
    rows, matrices = x[0].double(), integers(weight[0]).double()
    if antiquant_scale:
        offset = antiquant_offset[0] if antiquant_offset else torch.zeros(())
        values = matrices.unflatten(1, (_groups_of(antiquant_scale[0]), -1))
        values = values + _by_group(offset, matrices)
        matrices = (values * _by_group(antiquant_scale[0], matrices)).flatten(1, 2)
    is_shifted = weight[0].dtype == torch.int32 and x[0].dtype == torch.int8
    steps = _scales(scale[0]) if scale else torch.ones(1, 1, 1, dtype=torch.float64)
    sizes = (
        group_list
        if group_list_type == COUNTS
        else group_list.diff(prepend=group_list.new_zeros(1))
    )
    dtype = x[0].dtype if output_dtype is None else SCALAR_TYPES[output_dtype]
    result = torch.zeros(len(rows), matrices.shape[-1], dtype=dtype)
    start = 0
    for group, size in enumerate(sizes.tolist()):
        of_group = slice(start, start + size)
        step = steps[group if len(steps) > 1 else 0]
        added = bias[0][group].double() if bias else 0.0
        if is_shifted:
            product = (rows[of_group] - 8) @ (matrices[group] * step) + added
        else:
            product = (rows[of_group] @ matrices[group] + added) * step
        if per_token_scale:
            product = product * per_token_scale[0][of_group, None].double()
        result[of_group] = product.to(dtype)
        start += size
    return [result]


def _scales(scale: Tensor) -> Tensor:
    """[groups, 1, N]; an int64 holds the bits of a float32."""
    values = scale.int().view(torch.float32) if scale.dtype == torch.int64 else scale
    return values.double().reshape(len(scale), -1, scale.shape[-1])


def _groups_of(scale: Tensor) -> int:
    """Of K: a scale is [groups, N], or [groups, groups of K, N]."""
    return scale.shape[1] if scale.dim() == 3 else 1


def _by_group(values: Tensor, matrices: Tensor) -> Tensor:
    """[groups, groups of K, 1, N]"""
    if values.dim() == 0:
        return values
    return values.double().reshape(len(matrices), -1, 1, matrices.shape[-1])


@golden("npu::npu_moe_finalize_routing")
def moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int = 0,
    k: int = 1,
) -> Tensor:
    """out[i] = skip1[i] + skip2[i] + sum_j scales[i, j] * (rows[place(i, j)] + bias[expert]).

    place(i, j) is the index at i + j * tokens in drop_pad_mode 0 and at i * k + j in mode 2; a
    negative one adds nothing.
    """
    if drop_pad_mode not in (0, 2):
        raise UnsupportedArgumentError(f"drop_pad_mode={drop_pad_mode} is not emulated.")
    num_choices = k if scales is None else scales.shape[1]
    places = expanded_src_to_dst_row.long()
    by_token = (
        places.view(num_choices, -1).t() if drop_pad_mode == 0 else places.view(-1, num_choices)
    )
    rows = expanded_permuted_rows.float()[by_token.clamp(min=0)]
    if bias is not None and export_for_source_row is not None:
        rows = rows + bias.float()[export_for_source_row.long()]
    rows = rows.masked_fill((by_token < 0).unsqueeze(-1), 0.0)
    if scales is not None:
        rows = rows * scales.float().unsqueeze(-1)
    total = rows.sum(1)
    for skip in (skip1, skip2):
        total = total if skip is None else total + skip.float()
    return total.to(expanded_permuted_rows.dtype)
