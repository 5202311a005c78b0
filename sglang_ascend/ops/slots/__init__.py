"""Operators on the table that lists each request's KV slots."""

from sglang_ascend.ops.dispatch import Implementation, Op
from sglang_ascend.ops.slots import compiled, reference

assign_slots = Op("slots.assign_slots", reference.assign_slots)
assign_slots.register(
    Implementation("numba", compiled.assign_slots, frozenset({"cpu"}), compiled.is_available)
)
