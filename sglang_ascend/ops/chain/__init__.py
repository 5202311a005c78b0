"""Operators on a drafted chain: one preparation per step, verification, the tail's places."""

from sglang_ascend.ops.chain import reference
from sglang_ascend.ops.dispatch import Op

prepare_step = Op("chain.prepare_step", reference.prepare_step)
verify_chain = Op("chain.verify_chain", reference.verify_chain)
place_tail = Op("chain.place_tail", reference.place_tail)
