"""Mixture of experts: choose, group by expert, multiply, and sum what comes back."""

from sglang_ascend.ops.dispatch import Op, npu_body
from sglang_ascend.ops.experts import npu, reference

gating = Op("experts.gating", reference.gating)
gating.register(npu_body(npu.gating, accepts=npu.accepts_scores))
permute = Op("experts.permute", reference.permute)
permute.register(npu_body(npu.permute))
grouped_matmul = Op("experts.grouped_matmul", reference.grouped_matmul)
grouped_matmul.register(npu_body(npu.grouped_matmul))
unpermute = Op("experts.unpermute", reference.unpermute)
unpermute.register(npu_body(npu.unpermute))
