"""Gated activations."""

from sglang_ascend.ops.activation import fused, reference
from sglang_ascend.ops.dispatch import Op
from sglang_ascend.ops.on_npu import npu_body

swiglu = Op("activation.swiglu", reference.swiglu)
swiglu.register(npu_body(fused.swiglu))
