"""Operators on a drafted chain: one preparation per step, verification, the tail's places."""

from sglang_ascend.ops.chain import compiled, reference
from sglang_ascend.ops.dispatch import Implementation, Op


def _compiled(function) -> Implementation:
    return Implementation("numba", function, frozenset({"cpu"}), compiled.is_available)


prepare_step = Op("chain.prepare_step", reference.prepare_step)
prepare_step.register(_compiled(compiled.prepare_step))
verify_chain = Op("chain.verify_chain", reference.verify_chain)
verify_chain.register(_compiled(compiled.verify_chain))
place_tail = Op("chain.place_tail", reference.place_tail)
place_tail.register(_compiled(compiled.place_tail))
