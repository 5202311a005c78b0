"""A call of each operator that has a body for the NPU, in sizes of serving, on the CPU."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ascend import ops
from sglang_ascend.ops import mla

BF16, FP32 = torch.bfloat16, torch.float32
ROWS, HIDDEN, EPS = 32, 1024, 1e-6
PAGE_SIZE, NUM_PAGES = 128, 24

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class OperatorCall:
    """``build`` draws from torch's generator; the same seed makes the same call."""

    build: Callable[[torch.dtype], Arguments]
    dtypes: tuple[torch.dtype, ...] = (BF16, FP32)
    # Roundings to the output's type that body and reference may be apart.
    roundings: int = 1
    # What is done to the arguments once they are on their device, as at loading.
    placed: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda args: args
    # (result, arguments) -> the tensors in which body and reference must agree.
    compared: Callable[[Any, tuple[Any, ...]], Any] = lambda result, args: (result, args)


def arguments_of(call: OperatorCall, dtype: torch.dtype, seed: int = 0) -> Arguments:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return call.build(dtype)


def load_operators() -> None:
    """Fills ``ops.dispatch.OPS``."""
    for module in pkgutil.iter_modules(ops.__path__):
        if module.ispkg:
            importlib.import_module(f"{ops.__name__}.{module.name}")


def turned(dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [ROWS, dim], each half a copy of the other."""
    angles = torch.randn(ROWS, dim // 2).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def norm(dtype: torch.dtype) -> Arguments:
    return (torch.randn(ROWS, HIDDEN).to(dtype), torch.randn(HIDDEN).to(dtype), EPS), {}


def add_norm(dtype: torch.dtype) -> Arguments:
    x, residual = torch.randn(2, ROWS, HIDDEN).to(dtype).unbind()
    return (x, residual, torch.randn(HIDDEN).to(dtype), EPS), {}


def rotate(dtype: torch.dtype) -> Arguments:
    return (torch.randn(ROWS, 16, 64).to(dtype), *turned(64, dtype)), {}


def swiglu(dtype: torch.dtype) -> Arguments:
    return (torch.randn(ROWS, 2 * HIDDEN).to(dtype),), {}


def slots() -> torch.Tensor:
    return torch.randperm(NUM_PAGES * PAGE_SIZE)[:ROWS]


def write_kv(dtype: torch.dtype) -> Arguments:
    key, value = torch.randn(2, ROWS, 4, 128).to(dtype).unbind()
    caches = torch.zeros(2, NUM_PAGES, PAGE_SIZE, 4, 128, dtype=dtype)
    return (key, value, *caches.unbind(), slots()), {}


def write_latent(dtype: torch.dtype) -> Arguments:
    rows = torch.randn(ROWS, 576).to(dtype)
    latent = torch.zeros(NUM_PAGES, PAGE_SIZE, 1, 512, dtype=dtype)
    rope = torch.zeros(NUM_PAGES, PAGE_SIZE, 1, 64, dtype=dtype)
    weight = torch.randn(512).to(dtype)
    return (rows, weight, *turned(64, dtype), slots(), latent, rope, EPS), {}


def choose_experts(dtype: torch.dtype) -> Arguments:
    groups = {"num_groups": 8, "num_kept_groups": 4}
    scores, bias = torch.randn(ROWS, 256).to(dtype), torch.randn(256).to(dtype)
    return (scores, bias), {"num_experts_per_token": 8, "scale": 2.5, **groups}


def route(dtype: torch.dtype) -> Arguments:
    experts = torch.stack([torch.randperm(64)[:8] for _ in range(ROWS)]).int()
    return (torch.randn(ROWS, HIDDEN).to(dtype), experts), {"num_experts": 64}


def grouped_matmul(dtype: torch.dtype) -> Arguments:
    weights = HIDDEN**-0.5 * torch.randn(4, HIDDEN, 256)
    return (torch.randn(ROWS, HIDDEN).to(dtype), weights.to(dtype), torch.tensor([9, 0, 20, 3])), {}


def combine(dtype: torch.dtype) -> Arguments:
    shares = torch.rand(ROWS, 8).softmax(-1)
    copies = torch.randn(8 * ROWS, HIDDEN)
    return (copies.to(dtype), shares.to(dtype), torch.randperm(8 * ROWS).int()), {}


KV_LENS = torch.tensor([4, 129, 300, 511])
QUERY_LEN = 4


def pages() -> torch.Tensor:
    """int64 [requests, 4], no page twice."""
    return torch.randperm(NUM_PAGES)[: 4 * len(KV_LENS)].view(len(KV_LENS), 4)


def paged_mla(dtype: torch.dtype) -> Arguments:
    """In two parts each, as SGLang's model makes the query and its pool on NPU keeps the keys."""
    query, query_rope, cache, rope_cache = (
        torch.randn(num_rows, num_heads, width).to(dtype)
        for num_rows, num_heads in ((len(KV_LENS) * QUERY_LEN, 16), (NUM_PAGES * PAGE_SIZE, 1))
        for width in (512, 64)
    )
    sizes = {"query_len": QUERY_LEN, "page_size": PAGE_SIZE, "kv_lora_rank": 512}
    parts = {"query_rope": query_rope, "rope_cache": rope_cache}
    return (query, cache, pages(), KV_LENS.clone()), {**sizes, **parts, "scale": 576**-0.5}


def paged_gqa(dtype: torch.dtype) -> Arguments:
    query = torch.randn(len(KV_LENS) * QUERY_LEN, 16, 128).to(dtype)
    keys, values = torch.randn(2, NUM_PAGES * PAGE_SIZE, 4, 128).to(dtype).unbind()
    sizes = {"query_len": QUERY_LEN, "page_size": PAGE_SIZE, "scale": 128**-0.5}
    return (query, keys, values, pages(), KV_LENS.clone()), sizes


def prefill_gqa(dtype: torch.dtype) -> Arguments:
    """A chunk behind a prefix, and a whole prompt."""
    query_lens, kv_lens = (40, 300), (290, 300)
    keys, values = torch.randn(2, NUM_PAGES * PAGE_SIZE, 4, 128).to(dtype).unbind()
    table = torch.randperm(NUM_PAGES)[:6].view(2, 3)
    sizes = {"query_lens": query_lens, "page_size": PAGE_SIZE, "scale": 128**-0.5}
    return (torch.randn(340, 16, 128).to(dtype), keys, values, table, kv_lens), sizes


def mla_prolog(dtype: torch.dtype) -> Arguments:
    """DeepSeek-V3's sizes, with one rank's heads of sixteen."""

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) / (4 * shape[-2] ** 0.5)).to(dtype)

    projections = mla.Projections(
        w_dq=matrix(7168, 1536),
        q_norm=torch.randn(1536).to(dtype),
        w_uq_qr=matrix(1536, 8 * 192),
        w_uk=matrix(8, 128, 512),
        w_dkv_kr=matrix(7168, 576),
        kv_norm=torch.randn(512).to(dtype),
    )
    caches = [torch.zeros(NUM_PAGES, PAGE_SIZE, 1, width, dtype=dtype) for width in (512, 64)]
    rows = torch.randn(ROWS, 7168).to(dtype)
    return (rows, projections, *turned(64, dtype), slots(), *caches), {"eps": EPS}


def packed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(mla.packed(arg) if isinstance(arg, mla.Projections) else arg for arg in args)


def mla_pack(dtype: torch.dtype) -> Arguments:
    return (torch.randn(HIDDEN, 512).to(dtype),), {}


NUM_STEPS = 3


def prepare_step(dtype: torch.dtype) -> Arguments:
    table = torch.randperm(64 * 512).view(64, 512).int()
    seq_lens = torch.randint(500, (ROWS,))
    return (seq_lens, torch.randperm(64)[:ROWS], table, torch.arange(2 * NUM_STEPS), 512), {}


def verify_chain(dtype: torch.dtype) -> Arguments:
    return (torch.randint(2, (ROWS, NUM_STEPS + 1)), torch.randint(2, (ROWS, NUM_STEPS))), {}


def place_tail(dtype: torch.dtype) -> Arguments:
    accepted = torch.randint(1, NUM_STEPS + 2, (ROWS,)).int()
    step_slots = torch.randperm(ROWS * 2 * NUM_STEPS).view(ROWS, -1)
    offsets = torch.arange(NUM_STEPS - 1)[:, None]
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
    "activation.swiglu": OperatorCall(swiglu),
    # Two of the attention's roundings are inside of it: of the weights, and of the result.
    "attention.paged_gqa": OperatorCall(paged_gqa, roundings=2),
    "attention.paged_gqa_ragged": OperatorCall(prefill_gqa, roundings=2),
    "attention.paged_mla": OperatorCall(paged_mla, roundings=2),
    "chain.place_tail": OperatorCall(place_tail, INTEGERS),
    "chain.prepare_step": OperatorCall(prepare_step, INTEGERS),
    "chain.verify_chain": OperatorCall(verify_chain, INTEGERS),
    "experts.choose": OperatorCall(choose_experts, (FP32,)),
    "experts.combine": OperatorCall(combine),
    "experts.grouped_matmul": OperatorCall(grouped_matmul),
    "experts.route": OperatorCall(route),
    "kv_cache.write_kv": OperatorCall(write_kv),
    "kv_cache.write_latent": OperatorCall(write_latent),
    "mla.pack": OperatorCall(mla_pack),
    "mla.prolog": OperatorCall(mla_prolog, (BF16,), roundings=2, placed=packed),
    "norm.add_rms_norm": OperatorCall(add_norm),
    "norm.rms_norm": OperatorCall(norm),
    "rotary.rotate_halves": OperatorCall(rotate),
    "rotary.rotate_pairs": OperatorCall(rotate),
    "sampling.filter_probs": OperatorCall(filter_probs, (FP32,)),
    "sampling.top_k_top_p": OperatorCall(top_k_top_p, compared=kept_tokens),
}
