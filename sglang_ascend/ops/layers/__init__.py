"""What a decoder layer computes between its products: norms, rotation, gated activation."""

from sglang_ascend.ops.dispatch import Op, npu_body, numba_body
from sglang_ascend.ops.layers import npu, reference

NUMBA = "sglang_ascend.ops.layers.numba"

rms_norm = Op("layers.rms_norm", reference.rms_norm)
rms_norm.register(numba_body(NUMBA, "rms_norm", accepts="accepts_norm"))
add_rms_norm = Op("layers.add_rms_norm", reference.add_rms_norm)
add_rms_norm.register(numba_body(NUMBA, "add_rms_norm", accepts="accepts_add_norm"))
rotate_neox = Op("layers.rotate_neox", reference.rotate_neox)
rotate_neox.register(numba_body(NUMBA, "rotate_neox", accepts="accepts_rotation"))
rotate_interleaved = Op("layers.rotate_interleaved", reference.rotate_interleaved)
rotate_interleaved.register(numba_body(NUMBA, "rotate_interleaved", accepts="accepts_pairs"))
swiglu = Op("layers.swiglu", reference.swiglu)
swiglu.register(npu_body(npu.swiglu))
swiglu.register(numba_body(NUMBA, "swiglu", accepts="accepts_rows"))
