"""Operators on the table that lists each request's KV slots."""

from sglang_ascend.ops.compiled_on_cpu import numba_body
from sglang_ascend.ops.dispatch import Op
from sglang_ascend.ops.slots import compiled, reference

assign_slots = Op("slots.assign_slots", reference.assign_slots)
assign_slots.register(numba_body(compiled.assign_slots))
