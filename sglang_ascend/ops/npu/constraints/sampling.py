"""Constraints of the operator that filters logits."""

from __future__ import annotations

import torch

from sglang_ascend.ops.npu.constraint import FLOATS_AND_FP32, Constraints, rule

CONSTRAINTS = (
    Constraints(
        "npu_top_k_top_p",
        (
            rule(13801, "支持2维", "logits are [rows, vocab_size]")(lambda c: c.logits.dim() == 2),
            rule(13801, "torch.bfloat16, torch.float16, torch.float32", "logits are floats")(
                lambda c: c.logits.dtype in FLOATS_AND_FP32
            ),
            rule(13802, "不支持p和k同时传None", "p and k are not both left out")(
                lambda c: c.p is not None or c.k is not None
            ),
            rule(13802, "数据类型需要与logits一致", "p has the dtype of logits")(
                lambda c: c.p is None or c.p.dtype == c.logits.dtype
            ),
            rule(13802, "shape支持1维且需要与logits的首轴相同", "p has one value a row")(
                lambda c: c.p is None or c.p.shape == c.logits.shape[:1]
            ),
            rule(13803, "数据类型支持torch.int32", "k is int32")(
                lambda c: c.k is None or c.k.dtype == torch.int32
            ),
            rule(13803, "shape支持1维且需要与logits的首轴相同", "k has one value a row")(
                lambda c: c.k is None or c.k.shape == c.logits.shape[:1]
            ),
        ),
    ),
)
