"""Constraints of what works row by row: norms, rotations, activations."""

from __future__ import annotations

import torch

from sglang_ascend.ops.npu.constraint import FLOATS_AND_FP32, Constraints, rule

ADD_RMS_NORM = "aclnnAddRmsNorm, CANN documentation"
INTERLEAVE_ROPE = "aclnnInterleaveRope, CANN documentation"
ROPE_BY_CACHE = "aclnnRopeWithSinCosCache, CANN documentation"


def _alignment(rows: torch.Tensor) -> int:
    """What a rotation asks of widths, which are 64 bytes."""
    return 16 if rows.dtype == torch.float32 else 32


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
        "npu_mrope",
        (
            rule(3616, "1D或2D", "positions are [tokens] or [3, tokens], int32 or int64")(
                lambda c: (
                    (c.positions.dim() == 1 or c.positions.shape[:-1] == (3,))
                    and c.positions.dtype in (torch.int32, torch.int64)
                )
            ),
            rule(3626, "只支持2维shape输入", "queries, keys and the cache have two dimensions")(
                lambda c: c.query.dim() == c.key.dim() == c.cos_sin_cache.dim() == 2
            ),
            rule(0, ROPE_BY_CACHE, "queries, keys and the cache have one dtype")(
                lambda c: c.query.dtype == c.key.dtype == c.cos_sin_cache.dtype
            ),
            rule(3617, "numQHeads*headSize", "queries and keys are heads of head_size columns")(
                lambda c: c.query.shape[1] % c.head_size == c.key.shape[1] % c.head_size == 0
            ),
            rule(0, ROPE_BY_CACHE, "32 divides head_size, 16 in float32")(
                lambda c: c.head_size % _alignment(c.query) == 0
            ),
            rule(3627, "rotary_dim要求是32的倍数", "32 divides the rotated columns, 16 in float32")(
                lambda c: c.cos_sin_cache.shape[1] % _alignment(c.query) == 0
            ),
            rule(0, ROPE_BY_CACHE, "a head has the rotated columns, and may have more")(
                lambda c: c.cos_sin_cache.shape[1] <= c.head_size
            ),
            rule(3622, "'half'表示", "rotary_mode is half or interleave")(
                lambda c: c.rotary_mode in ("half", "interleave")
            ),
            rule(3629, "==rotary_dim/2", "the sections of three rows are half the rotated columns")(
                lambda c: (
                    c.positions.dim() == 1
                    or 2 * sum(c.mrope_section or ()) == c.cos_sin_cache.shape[1]
                )
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
