"""Mixture of experts: choose, group by expert, multiply, and sum what comes back."""

from sglang_ascend.ops.dispatch import Op, npu_body, numba_body
from sglang_ascend.ops.experts import npu, reference

NUMBA = "sglang_ascend.ops.experts.numba"

gating = Op("experts.gating", reference.gating)
gating.register(npu_body(npu.gating, accepts=npu.accepts_scores))
gating.register(numba_body(f"{NUMBA}_gating", "gating", accepts="accepts_scores"))
permute = Op("experts.permute", reference.permute)
permute.register(npu_body(npu.permute))
permute.register(numba_body(NUMBA, "permute", accepts="accepts_rows"))
grouped_matmul = Op("experts.grouped_matmul", reference.grouped_matmul)
grouped_matmul.register(npu_body(npu.grouped_matmul))
grouped_matmul.register(numba_body(NUMBA, "grouped_matmul", accepts="accepts_groups"))
unpermute = Op("experts.unpermute", reference.unpermute)
unpermute.register(npu_body(npu.unpermute))
unpermute.register(numba_body(NUMBA, "unpermute", accepts="accepts_copies"))
