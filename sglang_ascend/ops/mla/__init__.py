"""What stands before latent attention: from hidden states to queries and cached latents."""

from sglang_ascend.ops.dispatch import Op
from sglang_ascend.ops.mla import fused, reference
from sglang_ascend.ops.mla.reference import Projections
from sglang_ascend.ops.on_npu import npu_body

prolog = Op("mla.prolog", reference.prolog)
prolog.register(npu_body(fused.prolog, fused.accepts))
pack = Op("mla.pack", reference.pack)
pack.register(npu_body(fused.pack))


def packed(projections: Projections) -> Projections:
    """With the matrices that ``prolog`` multiplies by packed for their device, once, at loading."""
    return projections._replace(
        w_dq=pack(projections.w_dq),
        w_uq_qr=pack(projections.w_uq_qr),
        w_dkv_kr=pack(projections.w_dkv_kr),
    )
