"""Operators that turn logits into tokens."""

from sglang_ascend.ops.compiled_on_cpu import numba_body
from sglang_ascend.ops.dispatch import Implementation, Op
from sglang_ascend.ops.launched_by_triton import triton_body
from sglang_ascend.ops.sampling import compiled, launched, reference, threshold, vectorised

greedy = Op("sampling.greedy", reference.greedy)
greedy.register(
    Implementation("numpy", vectorised.greedy, frozenset({"cpu"}), lambda: True, vectorised.accepts)
)
filter_probs = Op("sampling.filter_probs", reference.filter_probs)
filter_probs.register(numba_body(compiled.filter_probs, accepts=compiled.accepts_filters))
filter_probs.register(triton_body(launched.filter_probs, launched.accepts_filters))
draw = Op("sampling.draw", reference.draw)
race = Op("sampling.race", reference.race)
race_by_seed = Op("sampling.race_by_seed", reference.race_by_seed)
murmur_hash32 = Op("sampling.murmur_hash32", reference.murmur_hash32)
top_k_top_p = Op("sampling.top_k_top_p", threshold.top_k_top_p)
top_k_top_p.register(numba_body(compiled.top_k_top_p, accepts=compiled.accepts))
top_k_top_p.register(triton_body(launched.top_k_top_p, launched.accepts_rows))
draw_kept = Op("sampling.draw_kept", threshold.draw_kept)
draw_kept.register(numba_body(compiled.draw_kept, accepts=compiled.accepts))
draw_kept.register(triton_body(launched.draw_kept, launched.accepts, frozenset({"cuda"})))
