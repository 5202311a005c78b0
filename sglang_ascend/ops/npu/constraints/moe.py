"""Constraints of mixture-of-experts operators."""

from __future__ import annotations

import torch

from sglang_ascend.ops.npu.constraint import FLOATS_AND_FP32, Constraints, rule

CONSTRAINTS = (
    Constraints(
        "npu_moe_gating_top_k",
        (
            rule(10823, "要求是一个2D的Tensor", "scores are [rows, experts]")(
                lambda c: c.x.dim() == 2 and c.x.dtype in FLOATS_AND_FP32
            ),
            rule(10823, "要求不大于`2048`", "there are at most 2048 experts")(
                lambda c: c.x.shape[-1] <= 2048
            ),
            rule(10825, "1 <= k <= x_shape[-1] / group_count * k_group", "k fits the groups")(
                lambda c: 1 <= c.k <= c.x.shape[-1] // c.group_count * c.k_group
            ),
            rule(
                10829, "数据类型需要与`x`保持一致", "bias is [experts] in the dtype of the scores"
            )(
                lambda c: (
                    c.bias is None or (c.bias.shape == c.x.shape[-1:] and c.bias.dtype == c.x.dtype)
                )
            ),
            rule(
                10837,
                "能够被`group_count`整除且整除后的结果大于`2`",
                "groups have 3 experts or more",
            )(lambda c: c.x.shape[-1] % c.group_count == 0 and c.x.shape[-1] // c.group_count > 2),
            rule(10841, "当前仅支持`0`", "renorm is 0")(lambda c: c.renorm == 0),
        ),
    ),
    Constraints(
        "npu_moe_gating_top_k_softmax",
        (
            rule(10706, "数据类型支持float16、bfloat16、float32", "scores are floats")(
                lambda c: c.x.dim() in (2, 3) and c.x.dtype in FLOATS_AND_FP32
            ),
            rule(10708, "k<=1024", "k is at most 1024 and at most the number of experts")(
                lambda c: 0 < c.k <= min(1024, c.x.shape[-1])
            ),
        ),
    ),
    Constraints(
        "npu_moe_init_routing_v2",
        (
            rule(11089, "要求为2D的Tensor", "rows are [rows, width]")(lambda c: c.x.dim() == 2),
            rule(11090, "数据类型支持int32", "expert ids are int32")(
                lambda c: c.expert_idx.dtype == torch.int32 and len(c.expert_idx) == len(c.x)
            ),
            rule(11100, "当前仅支持0", "no row is dropped")(lambda c: c.drop_pad_mode == 0),
            rule(11101, "当前仅支持1和2", "expert_tokens_num_type is 1 or 2")(
                lambda c: c.expert_tokens_num_type in (1, 2)
            ),
            rule(11102, "当前仅支持True", "expert_tokens_num_flag is set")(
                lambda c: c.expert_tokens_num_flag
            ),
            rule(11103, "当前仅支持-1和1", "quant_mode is -1 or 1")(
                lambda c: c.quant_mode in (-1, 1)
            ),
            rule(11104, "expert_end不大于expert_num", "the active experts are among all")(
                lambda c: (
                    len(c.active_expert_range) == 2
                    and 0 <= c.active_expert_range[0] <= c.active_expert_range[1] <= c.expert_num
                )
            ),
        ),
    ),
    Constraints(
        "npu_moe_finalize_routing",
        (
            rule(10616, "数据类型支持int32", "the row of each expert's result is int32")(
                lambda c: (
                    c.expanded_src_to_dst_row.dtype == torch.int32
                    and c.expanded_src_to_dst_row.dim() == 1
                )
            ),
            rule(10611, "要求是一个2D的Tensor", "the experts' results are [rows * k, width]")(
                lambda c: c.expanded_permuted_rows.dim() == 2
            ),
            rule(10613, "skip2参数为None时, skip1参数必须也为None", "skip1 is not without skip2")(
                lambda c: c.skip1 is None or c.skip2 is not None
            ),
            rule(
                10615, "数据类型要求与expanded_permuted_rows一致", "scales have the results' dtype"
            )(lambda c: c.scales is None or c.scales.dtype == c.expanded_permuted_rows.dtype),
        ),
    ),
)
