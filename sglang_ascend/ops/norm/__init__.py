"""Root-mean-square norms."""

from sglang_ascend.ops.dispatch import Op
from sglang_ascend.ops.norm import fused, reference
from sglang_ascend.ops.on_npu import npu_body

rms_norm = Op("norm.rms_norm", reference.rms_norm)
rms_norm.register(npu_body(fused.rms_norm))
add_rms_norm = Op("norm.add_rms_norm", reference.add_rms_norm)
add_rms_norm.register(npu_body(fused.add_rms_norm))
