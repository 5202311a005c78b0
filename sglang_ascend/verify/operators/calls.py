"""A call of each operator that has a body for the NPU, in sizes of serving, on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ascend.verify.operators.operator_call import (
    FP32,
    HIDDEN,
    ROWS,
    Arguments,
    OperatorCall,
)
from sglang_ascend.verify.operators.quantized_calls import QUANTIZED

PAGE_SIZE, NUM_PAGES = 128, 24


def gating(dtype: torch.dtype) -> Arguments:
    groups = {"num_groups": 8, "num_kept_groups": 4}
    scores, bias = torch.randn(ROWS, 256).to(dtype), torch.randn(256).to(dtype)
    return (scores, bias), {"num_experts_per_token": 8, "scale": 2.5, **groups}


def permute(dtype: torch.dtype) -> Arguments:
    experts = torch.stack([torch.randperm(64)[:8] for _ in range(ROWS)]).int()
    return (torch.randn(ROWS, HIDDEN).to(dtype), experts), {"num_experts": 64}


def grouped_matmul(dtype: torch.dtype) -> Arguments:
    weights = HIDDEN**-0.5 * torch.randn(4, HIDDEN, 256)
    return (torch.randn(ROWS, HIDDEN).to(dtype), weights.to(dtype), torch.tensor([9, 0, 20, 3])), {}


def gate_up(dtype: torch.dtype) -> Arguments:
    return (torch.randn(ROWS, 2 * HIDDEN).to(dtype),), {}


def unpermute(dtype: torch.dtype) -> Arguments:
    shares = torch.rand(ROWS, 8).softmax(-1)
    copies = torch.randn(8 * ROWS, HIDDEN)
    return (copies.to(dtype), shares.to(dtype), torch.randperm(8 * ROWS).int()), {}


KV_LENS = torch.tensor([4, 129, 300, 511])
QUERY_LEN = 4


def pages(num_requests: int) -> torch.Tensor:
    """int64 [requests, 4]; no page twice among NUM_PAGES / 4 neighbouring requests."""
    rounds = [torch.randperm(NUM_PAGES) for _ in range(-(-4 * num_requests // NUM_PAGES))]
    return torch.cat(rounds)[: 4 * num_requests].view(num_requests, 4)


def paged_mla(dtype: torch.dtype, kv_lens: torch.Tensor = KV_LENS) -> Arguments:
    """In two parts each, as SGLang's model makes the query and its pool on NPU keeps the keys."""
    query, query_rope, cache, rope_cache = (
        torch.randn(num_rows, num_heads, width).to(dtype)
        for num_rows, num_heads in ((len(kv_lens) * QUERY_LEN, 16), (NUM_PAGES * PAGE_SIZE, 1))
        for width in (512, 64)
    )
    sizes = {"query_len": QUERY_LEN, "page_size": PAGE_SIZE, "kv_lora_rank": 512}
    parts = {"query_rope": query_rope, "rope_cache": rope_cache}
    return (query, cache, pages(len(kv_lens)), kv_lens.clone()), {
        **sizes,
        **parts,
        "scale": 576**-0.5,
    }


def paged_gqa(dtype: torch.dtype, kv_lens: torch.Tensor = KV_LENS) -> Arguments:
    query = torch.randn(len(kv_lens) * QUERY_LEN, 16, 128).to(dtype)
    keys, values = torch.randn(2, NUM_PAGES * PAGE_SIZE, 4, 128).to(dtype).unbind()
    sizes = {"query_len": QUERY_LEN, "page_size": PAGE_SIZE, "scale": 128**-0.5}
    return (query, keys, values, pages(len(kv_lens)), kv_lens.clone()), sizes


def prefill_gqa(dtype: torch.dtype) -> Arguments:
    """A chunk behind a prefix, and a whole prompt."""
    query_lens, kv_lens = (40, 300), (290, 300)
    keys, values = torch.randn(2, NUM_PAGES * PAGE_SIZE, 4, 128).to(dtype).unbind()
    table = torch.randperm(NUM_PAGES)[:6].view(2, 3)
    sizes = {"query_lens": query_lens, "page_size": PAGE_SIZE, "scale": 128**-0.5}
    return (torch.randn(340, 16, 128).to(dtype), keys, values, table, kv_lens), sizes


def prefill_mla(dtype: torch.dtype) -> Arguments:
    """The lengths of ``prefill_gqa``, over one stream of 80 + 32 columns."""
    (query, keys, _, table, kv_lens), sizes = prefill_gqa(dtype)
    operands = query[..., :112].contiguous(), keys[:, :1, :112].contiguous()
    return (*operands, table, kv_lens), {**sizes, "kv_lora_rank": 80}


NUM_STEPS = 3


def prepare_step(dtype: torch.dtype) -> Arguments:
    table = torch.randperm(64 * 512).view(64, 512).int()
    seq_lens = torch.randint(500, (ROWS,))
    return (seq_lens, torch.randperm(64)[:ROWS], table, torch.arange(2 * NUM_STEPS), 512), {}


def verify_chain(dtype: torch.dtype) -> Arguments:
    return (torch.randint(2, (ROWS, NUM_STEPS + 1)), torch.randint(2, (ROWS, NUM_STEPS))), {}


def place_draft_decode(dtype: torch.dtype) -> Arguments:
    accepted = torch.randint(1, NUM_STEPS + 2, (ROWS,)).int()
    step_slots = torch.randperm(ROWS * 2 * NUM_STEPS).view(ROWS, -1)
    offsets = torch.arange(NUM_STEPS)[:, None]
    return (torch.randint(500, (ROWS,)) + accepted, accepted, step_slots, offsets), {}


def top_k_top_p(dtype: torch.dtype) -> Arguments:
    logits = 3 * torch.randn(ROWS, 32768)
    top_ks = torch.tensor([1, 20, 50, 1 << 30]).repeat(ROWS // 4).int()
    top_ps = torch.tensor([0.5, 0.9, 0.95, 1.0]).repeat_interleave(ROWS // 4)
    return (logits.to(dtype), top_ks, top_ps), {}


def filter_probs(dtype: torch.dtype) -> Arguments:
    (logits, top_ks, top_ps), _ = top_k_top_p(dtype)
    temperatures = torch.tensor([0.7, 1.0]).repeat(ROWS // 2)[:, None]
    min_ps = torch.tensor([0.0, 0.05]).repeat_interleave(ROWS // 2)
    return (logits, temperatures, top_ks, top_ps, min_ps), {}


def kept_tokens(kept: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Which tokens, their mass and the largest: a threshold need not be a logit of its row."""
    logits = args[0].float()
    return (logits >= kept.threshold[:, None]) & (logits > -torch.inf), kept.mass, kept.max


INTEGERS = (torch.int64,)
CALLS = {
    # Two of the attention's roundings are inside of it: of the weights, and of the result.
    "attention.paged_gqa": OperatorCall(paged_gqa, roundings=2),
    "attention.paged_gqa_ragged": OperatorCall(prefill_gqa, roundings=2),
    "attention.paged_mla": OperatorCall(paged_mla, roundings=2),
    "attention.paged_mla_ragged": OperatorCall(prefill_mla, roundings=2),
    "chain.place_draft_decode": OperatorCall(place_draft_decode, INTEGERS),
    "chain.prepare_step": OperatorCall(prepare_step, INTEGERS),
    "chain.verify_chain": OperatorCall(verify_chain, INTEGERS),
    "experts.gating": OperatorCall(gating, (FP32,)),
    "experts.unpermute": OperatorCall(unpermute),
    "experts.grouped_matmul": OperatorCall(grouped_matmul),
    "experts.permute": OperatorCall(permute),
    "layers.swiglu": OperatorCall(gate_up),
    **QUANTIZED,
    "sampling.filter_probs": OperatorCall(filter_probs, (FP32,)),
    "sampling.top_k_top_p": OperatorCall(top_k_top_p, compared=kept_tokens),
}
