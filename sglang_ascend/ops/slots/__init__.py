"""Operators on the table that lists each request's KV slots."""

from sglang_ascend.ops.dispatch import Op, numba_body
from sglang_ascend.ops.slots import reference

NUMBA = "sglang_ascend.ops.slots.numba"

assign_slots = Op("slots.assign_slots", reference.assign_slots)
assign_slots.register(numba_body(NUMBA, "assign_slots"))
