"""Attention over a paged KV cache: grouped heads (GQA) and one latent stream (MLA)."""

from sglang_ascend.ops.attention import compiled, fused, launched, reference
from sglang_ascend.ops.compiled_on_cpu import numba_body
from sglang_ascend.ops.dispatch import Op
from sglang_ascend.ops.launched_by_triton import triton_body
from sglang_ascend.ops.on_npu import npu_body

paged_gqa = Op("attention.paged_gqa", reference.paged_gqa)
paged_gqa.register(numba_body(compiled.paged_gqa, accepts=compiled.accepts))
paged_gqa.register(triton_body(launched.paged_gqa, launched.accepts_gqa))
paged_gqa_ragged = Op("attention.paged_gqa_ragged", reference.paged_gqa_ragged)
paged_gqa_ragged.register(npu_body(fused.paged_gqa_ragged, fused.accepts_gqa_ragged))
paged_mla = Op("attention.paged_mla", reference.paged_mla)
paged_mla.register(triton_body(launched.paged_mla, launched.accepts_mla))
paged_mla_ragged = Op("attention.paged_mla_ragged", reference.paged_mla_ragged)
