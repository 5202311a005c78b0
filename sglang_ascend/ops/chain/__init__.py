"""Operators on a drafted chain: window slots and verification."""

from sglang_ascend.ops.chain import reference
from sglang_ascend.ops.dispatch import Op

window_slots = Op("chain.window_slots", reference.window_slots)
verify_chain = Op("chain.verify_chain", reference.verify_chain)
