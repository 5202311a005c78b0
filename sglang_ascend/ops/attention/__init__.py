"""Attention over a paged KV cache: grouped heads (GQA) and one latent stream (MLA)."""

from sglang_ascend.ops.attention import reference, torch, triton
from sglang_ascend.ops.dispatch import Op, numba_body, torch_body, triton_body

NUMBA = "sglang_ascend.ops.attention.numba"
NUMBA_PROMPTS = "sglang_ascend.ops.attention.numba_prompts"

paged_gqa = Op("attention.paged_gqa", reference.paged_gqa)
paged_gqa.register(numba_body(NUMBA, "paged_gqa", accepts="accepts"))
paged_gqa.register(triton_body(triton.paged_gqa, triton.accepts_gqa))
paged_gqa.register(torch_body(torch.paged_gqa))
paged_gqa_ragged = Op("attention.paged_gqa_ragged", reference.paged_gqa_ragged)
paged_gqa_ragged.register(numba_body(NUMBA_PROMPTS, "paged_gqa_ragged", accepts="accepts"))
paged_gqa_ragged.register(torch_body(torch.paged_gqa_ragged))
paged_mla = Op("attention.paged_mla", reference.paged_mla)
paged_mla.register(numba_body(NUMBA, "paged_mla", accepts="accepts_latent"))
paged_mla.register(triton_body(triton.paged_mla, triton.accepts_mla))
paged_mla.register(torch_body(torch.paged_mla))
paged_mla_ragged = Op("attention.paged_mla_ragged", reference.paged_mla_ragged)
paged_mla_ragged.register(numba_body(NUMBA_PROMPTS, "paged_mla_ragged", accepts="accepts_latent"))
paged_mla_ragged.register(torch_body(torch.paged_mla_ragged))
