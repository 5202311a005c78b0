"""Constraints of what works row by row: norms, rotations, activations."""

from __future__ import annotations

from sglang_ascend.ops.npu.constraint import FLOATS_AND_FP32, Constraints, rule

ADD_RMS_NORM = "aclnnAddRmsNorm, CANN documentation"
INTERLEAVE_ROPE = "aclnnInterleaveRope, CANN documentation"

CONSTRAINTS = (
    Constraints(
        "npu_rms_norm",
        (
            rule(3447, "支持float16、bfloat16、float32", "the input is a float tensor")(
                lambda c: c.input.dtype in FLOATS_AND_FP32
            ),
            rule(3448, "数据类型需要和self保持一致", "gamma has the dtype of the input")(
                lambda c: c.gamma.dtype == c.input.dtype
            ),
            rule(3448, "通常为self的最后一维", "gamma has the width of the input")(
                lambda c: c.gamma.shape == c.input.shape[-1:]
            ),
        ),
    ),
    Constraints(
        "npu_add_rms_norm",
        (
            rule(0, ADD_RMS_NORM, "both summands have one shape and dtype")(
                lambda c: c.x1.shape == c.x2.shape and c.x1.dtype == c.x2.dtype
            ),
            rule(0, ADD_RMS_NORM, "gamma has the width and the dtype of the summands")(
                lambda c: c.gamma.shape == c.x1.shape[-1:] and c.gamma.dtype == c.x1.dtype
            ),
        ),
    ),
    Constraints(
        "npu_rotary_mul",
        (
            rule(3542, "4维Tensor", "the input has 4 dimensions")(lambda c: c.input.dim() == 4),
            rule(3543, "4维Tensor", "cosines and sines have 4 dimensions")(
                lambda c: c.r1.dim() == c.r2.dim() == 4 and c.r1.shape == c.r2.shape
            ),
            rule(3545, "支持'half'、'interleave'两种模式", "rotary_mode is half or interleave")(
                lambda c: c.rotary_mode in ("half", "interleave")
            ),
            rule(3550, "D < 896，且为2的倍数", "the last dimension is even and below 896")(
                lambda c: c.input.shape[-1] < 896 and c.input.shape[-1] % 2 == 0
            ),
        ),
    ),
    Constraints(
        "npu_interleave_rope",
        (
            rule(0, INTERLEAVE_ROPE, "the input is [batch, heads, rows, 64]")(
                lambda c: c.x.dim() == 4 and c.x.shape[-1] == 64
            ),
            rule(0, INTERLEAVE_ROPE, "cosines and sines are [batch, 1, rows or 1, 64]")(
                lambda c: (
                    c.cos.shape == c.sin.shape
                    and c.cos.shape[1] == 1
                    and c.cos.shape[2] in (1, c.x.shape[2])
                    and c.cos.shape[::3] == c.x.shape[::3]
                )
            ),
        ),
    ),
    Constraints(
        "npu_swiglu",
        (
            rule(4404, "dtype支持FP32、FP16或BF16类型", "the input is a float tensor")(
                lambda c: c.input.dtype in FLOATS_AND_FP32
            ),
            rule(4401, "沿dim维度切分", "the split dimension has two equal halves")(
                lambda c: c.input.shape[c.dim] % 2 == 0
            ),
        ),
    ),
)
