"""Operators that turn logits into tokens."""

from sglang_ascend.ops.dispatch import CPU, Implementation, Op, numba_body, triton_body
from sglang_ascend.ops.sampling import numpy, reference, threshold, triton

NUMBA = "sglang_ascend.ops.sampling.numba"

greedy = Op("sampling.greedy", reference.greedy)
greedy.register(Implementation("numpy", numpy.greedy, CPU, lambda: True, numpy.accepts))
filter_probs = Op("sampling.filter_probs", reference.filter_probs)
filter_probs.register(numba_body(NUMBA, "filter_probs", accepts="accepts_filters"))
filter_probs.register(triton_body(triton.filter_probs, triton.accepts_filters))
sample = Op("sampling.sample", reference.sample)
inverse_cdf = Op("sampling.inverse_cdf", reference.inverse_cdf)
murmur_hash32 = Op("sampling.murmur_hash32", reference.murmur_hash32)
top_k_top_p = Op("sampling.top_k_top_p", threshold.top_k_top_p)
top_k_top_p.register(numba_body(NUMBA, "top_k_top_p", accepts="accepts"))
top_k_top_p.register(triton_body(triton.top_k_top_p, triton.accepts_rows))
