"""MTP layers whole: at a row or two their operators take longer to be called than to compute."""

from sglang_ascend.ops.dispatch import Op, numba_body
from sglang_ascend.ops.drafts import reference

LATENT = "sglang_ascend.ops.drafts.numba_latent"

prepare_latent = Op("drafts.prepare_latent", reference.prepare_latent)
prepare_latent.register(numba_body(LATENT, "prepare", "accepts_weights"))
latent_layer = Op("drafts.latent_layer", reference.latent_layer)
latent_layer.register(numba_body(LATENT, "latent_layer", "accepts_rows"))
latent_chain = Op("drafts.latent_chain", reference.latent_chain)
latent_chain.register(
    numba_body("sglang_ascend.ops.drafts.numba_chain", "latent_chain", "accepts_rows")
)
