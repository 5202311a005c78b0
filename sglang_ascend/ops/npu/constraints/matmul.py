"""Constraints of matrix products: quantized, weight-only quantized, grouped."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_ascend.ops.npu.constraint import FLOATS, FLOATS_AND_FP32, Constraints, rule

TRANSPOSED_PRODUCT = "aclnnTransposeBatchMatMul, CANN 9.0 documentation"
AS_THEY_ARE, EXCHANGED = (0, 1, 2), (1, 0, 2)


def _columns(call: SimpleNamespace) -> int:
    """Of x2 as numbers: an int32 holds 8 int4."""
    return call.x2.shape[-1] * (8 if call.x2.dtype == torch.int32 else 1)


def _scale_fits_result(call: SimpleNamespace) -> bool:
    """Of int8 rows and int8 weights; packed int4 has scales of another form."""
    if call.x[0].dtype != torch.int8 or call.weight[0].dtype != torch.int8:
        return True
    wanted = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}.get(call.output_dtype)
    return wanted is None or all(scale.dtype == wanted for scale in call.scale or ())


def _rows_match(call: SimpleNamespace) -> bool:
    """Each weight is [k, n], or [groups, k, n] for a single one."""
    pairs = zip(call.x, call.weight, strict=False)
    return all(x.shape[-1] == weight.shape[-2] for x, weight in pairs)


def _is_exchanged(call: SimpleNamespace) -> bool:
    """Whether the first operand lies as [m, batch, k], not as [batch, m, k]."""
    return tuple(call.perm_x1 or AS_THEY_ARE) == EXCHANGED


def _batch(call: SimpleNamespace) -> int:
    return call.input.shape[1 if _is_exchanged(call) else 0]


CONSTRAINTS = (
    Constraints(
        "npu_quant_matmul",
        (
            rule(4964, "数据类型支持int8和int32", "x1 is int8, or int32 that holds int4")(
                lambda c: c.x1.dtype in (torch.int8, torch.int32)
            ),
            rule(4968, "数据类型与x1的数据类型保持一致", "x2 has the dtype of x1")(
                lambda c: c.x2.dtype == c.x1.dtype
            ),
            rule(4972, "t=1或n, 其中n与x2的n一致", "scale has one value, or one a column of x2")(
                lambda c: c.scale.dim() == 1 and len(c.scale) in (1, _columns(c))
            ),
            rule(
                4972, "数据类型支持float32、int64、bfloat16", "scale is float32, int64 or bfloat16"
            )(lambda c: c.scale.dtype in (torch.float32, torch.int64, torch.bfloat16)),
            rule(
                5001,
                "x1与x2最后一维的shape大小不能超过65535",
                "rows of x1 and x2 have at most 65535 columns",
            )(lambda c: c.x1.shape[-1] <= 65535 and _columns(c) <= 65535),
            rule(
                4978, "shape需要是1维(m,), 其中m与x1的m一致", "pertoken_scale has one value a row"
            )(lambda c: c.pertoken_scale is None or c.pertoken_scale.shape == c.x1.shape[-2:-1]),
        ),
    ),
    Constraints(
        "npu_weight_quant_batchmatmul",
        (
            rule(5464, "x和weight后两维必须为(M, K)和(K, N)格式", "x is [m, k], the weight [k, n]")(
                lambda c: (
                    c.x.dim() == 2 and c.weight.dim() == 2 and c.x.shape[1] == c.weight.shape[0]
                )
            ),
            rule(5464, "K、N的范围为[1, 65535]", "the weight has at most 65535 rows and columns")(
                lambda c: (
                    len(c.weight) <= 65535
                    and c.weight.shape[1] * (8 if c.weight.dtype == torch.int32 else 1) <= 65535
                )
            ),
            rule(5437, "其数据类型需与x保持一致", "a float antiquant_scale has the dtype of x")(
                lambda c: c.antiquant_scale.dtype in (c.x.dtype, torch.int64)
            ),
            rule(5466, "输入shape要保持一致", "antiquant_offset has the shape of the scale")(
                lambda c: (
                    c.antiquant_offset is None
                    or c.antiquant_offset.shape == c.antiquant_scale.shape
                )
            ),
            rule(5454, "[32, K-1]且必须是32的倍数", "a group has a multiple of 32 rows, below k")(
                lambda c: (
                    c.antiquant_group_size == 0
                    or (
                        c.antiquant_group_size % 32 == 0
                        and 32 <= c.antiquant_group_size <= c.x.shape[1] - 1
                    )
                )
            ),
        ),
    ),
    Constraints(
        "npu_transpose_batchmatmul",
        (
            rule(
                5622, "必选参数, 一个3D的Device侧Tensor输入", "both operands have three dimensions"
            )(lambda c: c.input.dim() == c.weight.dim() == 3),
            rule(5622, "数据类型支持float32、float16、bfloat16", "the operands are floats")(
                lambda c: {c.input.dtype, c.weight.dtype} <= set(FLOATS_AND_FP32)
            ),
            rule(0, TRANSPOSED_PRODUCT, "the operands have one dtype")(
                lambda c: c.input.dtype == c.weight.dtype
            ),
            rule(0, TRANSPOSED_PRODUCT, "only the first operand is permuted, and the result")(
                lambda c: (
                    tuple(c.perm_x1 or AS_THEY_ARE) in (AS_THEY_ARE, EXCHANGED)
                    and tuple(c.perm_x2 or AS_THEY_ARE) == AS_THEY_ARE
                    and tuple(c.perm_y or EXCHANGED) == EXCHANGED
                )
            ),
            rule(0, TRANSPOSED_PRODUCT, "the operands are [batch, m, k] and [batch, k, n]")(
                lambda c: c.weight.shape[:2] == (_batch(c), c.input.shape[2])
            ),
            rule(0, TRANSPOSED_PRODUCT, "batch and n are below 65536")(
                lambda c: max(c.weight.shape[::2]) < 65536
            ),
            rule(0, TRANSPOSED_PRODUCT, "k is at most 65535, and batch * k of [m, batch, k]")(
                lambda c: c.input.shape[2] * (_batch(c) if _is_exchanged(c) else 1) <= 65535
            ),
            rule(0, TRANSPOSED_PRODUCT, "there is no bias")(lambda c: c.bias is None),
        ),
    ),
    Constraints(
        "npu_grouped_matmul",
        (
            rule(5884, "C[m,n]=A[m,k]xB[k,n]", "x and its weight share k")(_rows_match),
            rule(5821, "列表最大长度为128", "there are at most 128 matrices")(
                lambda c: len(c.x) <= 128 and len(c.weight) <= 128
            ),
            rule(
                5822,
                "其他情况下, 张量仅支持2维输入",
                "x is [rows, k] when the result is one tensor",
            )(lambda c: c.split_item in (0, 1) or all(x.dim() == 2 for x in c.x)),
            rule(
                5964,
                "scale: torch.bfloat16, torch.float32",
                "int8 rows have bfloat16 scales for a bfloat16 result, float32 for float16",
            )(_scale_fits_result),
            rule(
                5890,
                "0代表group_list_type中数值为分组轴大小的cumsum结果",
                "group_list_type is 0 or 1",
            )(lambda c: c.group_list_type in (0, 1)),
        ),
    ),
    Constraints(
        "npu_dynamic_quant",
        (
            rule(
                4673,
                "数据类型支持torch.float16、torch.bfloat16",
                "the input is float16 or bfloat16",
            )(lambda c: c.input.dtype in FLOATS),
            rule(4673, "输入x的维度必须大于1", "the input has two dimensions or more")(
                lambda c: c.input.dim() > 1
            ),
        ),
    ),
    Constraints(
        "npu_quantize",
        (
            rule(11357, "数据类型支持float、float16、bfloat16", "the input is a float tensor")(
                lambda c: c.input.dtype in FLOATS_AND_FP32
            ),
            rule(
                11369, "zero_points的shape和dtype需要和scales一致", "zero_points are as the scales"
            )(
                lambda c: (
                    c.div_mode
                    or c.zero_points is None
                    or (
                        c.zero_points.shape == c.scales.shape
                        and c.zero_points.dtype == c.scales.dtype
                    )
                )
            ),
            rule(
                11376,
                "div_mode为False时, 类型支持torch.qint8、torch.quint4x2",
                "multiplied, the result is qint8 or quint4x2",
            )(lambda c: c.div_mode or c.dtype in (torch.qint8, torch.quint4x2)),
        ),
    ),
    Constraints(
        "npu_convert_weight_to_int4pack",
        (
            rule(5696, "数据类型支持int32", "the weight is [k, n] int32, contiguous")(
                lambda c: (
                    c.weight.dtype == torch.int32
                    and c.weight.dim() == 2
                    and c.weight.is_contiguous()
                )
            ),
            rule(5696, "最后一维度需要8个元素对齐", "8 divides the last dimension")(
                lambda c: c.weight.shape[-1] % 8 == 0
            ),
        ),
    ),
)
