"""Operators on a drafted chain: one preparation per step, verification, where drafts
are decoded, drafts by lookup, what else a request may draft."""

from sglang_ascend.ops.chain import reference, triton
from sglang_ascend.ops.dispatch import Op, numba_body, triton_body

NUMBA = "sglang_ascend.ops.chain.numba"

prepare_step = Op("chain.prepare_step", reference.prepare_step)
prepare_step.register(numba_body(NUMBA, "prepare_step"))
prepare_step.register(triton_body(triton.prepare_step, triton.accepts_prepare_step))
verify_chain = Op("chain.verify_chain", reference.verify_chain)
verify_chain.register(numba_body(NUMBA, "verify_chain"))
verify_chain.register(triton_body(triton.verify_chain, triton.accepts_verify_chain))
verify_by_rejection = Op("chain.verify_by_rejection", reference.verify_by_rejection)
place_draft_decode = Op("chain.place_draft_decode", reference.place_draft_decode)
place_draft_decode.register(numba_body(NUMBA, "place_draft_decode"))
place_draft_decode.register(
    triton_body(triton.place_draft_decode, triton.accepts_place_draft_decode)
)
look_up = Op("chain.look_up", reference.look_up)
look_up.register(numba_body(NUMBA, "look_up"))
extend_context = Op("chain.extend_context", reference.extend_context)
extend_context.register(numba_body(NUMBA, "extend_context"))
