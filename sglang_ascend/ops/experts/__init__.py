"""Mixture of experts: choose, group by expert, multiply, and sum what comes back."""

from sglang_ascend.ops.dispatch import Op
from sglang_ascend.ops.experts import fused, reference
from sglang_ascend.ops.on_npu import npu_body

choose = Op("experts.choose", reference.choose)
choose.register(npu_body(fused.choose, fused.accepts_scores))
route = Op("experts.route", reference.route)
route.register(npu_body(fused.route))
grouped_matmul = Op("experts.grouped_matmul", reference.grouped_matmul)
grouped_matmul.register(npu_body(fused.grouped_matmul))
combine = Op("experts.combine", reference.combine)
combine.register(npu_body(fused.combine))
