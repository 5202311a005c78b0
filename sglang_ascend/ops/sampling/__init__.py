"""Operators that draw tokens."""

from sglang_ascend.ops.dispatch import Implementation, Op
from sglang_ascend.ops.sampling import reference, vectorised

greedy = Op("sampling.greedy", reference.greedy)
greedy.register(
    Implementation("numpy", vectorised.greedy, frozenset({"cpu"}), lambda: True, vectorised.accepts)
)
