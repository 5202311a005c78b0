"""Operators on a drafted chain: one preparation per step, verification, the tail's places."""

from sglang_ascend.ops.chain import compiled, launched, reference
from sglang_ascend.ops.compiled_on_cpu import numba_body
from sglang_ascend.ops.dispatch import Op
from sglang_ascend.ops.launched_by_triton import triton_body

prepare_step = Op("chain.prepare_step", reference.prepare_step)
prepare_step.register(numba_body(compiled.prepare_step))
prepare_step.register(triton_body(launched.prepare_step, launched.accepts_prepare_step))
verify_chain = Op("chain.verify_chain", reference.verify_chain)
verify_chain.register(numba_body(compiled.verify_chain))
verify_chain.register(triton_body(launched.verify_chain, launched.accepts_verify_chain))
verify_by_rejection = Op("chain.verify_by_rejection", reference.verify_by_rejection)
place_tail = Op("chain.place_tail", reference.place_tail)
place_tail.register(numba_body(compiled.place_tail))
place_tail.register(triton_body(launched.place_tail, launched.accepts_place_tail))
