"""Operators that turn logits into tokens."""

from sglang_ascend.ops.dispatch import Implementation, Op
from sglang_ascend.ops.sampling import reference, vectorised

greedy = Op("sampling.greedy", reference.greedy)
greedy.register(
    Implementation("numpy", vectorised.greedy, frozenset({"cpu"}), lambda: True, vectorised.accepts)
)
filter_probs = Op("sampling.filter_probs", reference.filter_probs)
draw = Op("sampling.draw", reference.draw)
murmur_hash32 = Op("sampling.murmur_hash32", reference.murmur_hash32)
