"""Prints how many programs Triton would compile, kernel by kernel, for steps of many sizes, how
many of them the warm-up at start leaves for later, and what numbers of splits attention had.

Controls, by an argument: `specialized`, the same kernels without a word on what not to specialize;
`splits=N`, a start whose attention has N splits in every step.

A process of its own: where a test has asked for Triton's interpreter nothing is compiled. No GPU is
needed: what a program is compiled for is decided on the host, from a launch's arguments.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.ops.attention import (
    tiles,
    triton_kernels,
    triton_latent_kernels,
    triton_memory_kernels,
)
from sglang_ascend.ops.attention import triton as attention
from sglang_ascend.ops.chain import triton as chain
from sglang_ascend.ops.chain import triton_kernels as chain_kernels
from sglang_ascend.ops.sampling import threshold, triton_filter_kernels
from sglang_ascend.ops.sampling import triton as sampling
from sglang_ascend.ops.sampling import triton_kernels as sampling_kernels
from sglang_ascend.speculative import captured, step
from sglang_ascend.speculative.forwards import Requests, Rows
from sglang_ascend.speculative.step import LaunchedPhases, StepConstants

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
NUM_STEPS, VOCAB_SIZE, PAGE_SIZE = 2, 20000, 128  # rows of a step: no multiple of 16 bytes
BATCHES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 100, 128, 160)
# Strides of tables: 1, multiples of 16, others; one request has every number of splits.
NUM_PAGES = (*range(1, 26), 48, 320)
KERNELS = (
    (chain_kernels, "prepare_step"),
    (chain_kernels, "verify_chain"),
    (chain_kernels, "place_draft_decode"),
    (sampling_kernels, "stream"),
    (sampling_kernels, "bound"),
    (sampling_kernels, "refine"),
    (triton_filter_kernels, "weigh"),
    (triton_kernels, "gqa_split"),
    (triton_latent_kernels, "mla_in_parts"),
    (triton_memory_kernels, "mla_in_memory"),
    (triton_latent_kernels, "merge_splits"),
)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 1, 64
# So many heads have 60 verified rows, whose sums stay near memory, and 120, whose sums do not.
LATENT_HEADS, RANK, ROPE = (20, 40), 512, 64


class Launches:
    """Stands where a kernel does; notes what each launch would be compiled for."""

    def __init__(self, module: ModuleType, name: str, specialized: bool) -> None:
        kernel = getattr(module, name)
        setattr(module, name, self)
        if specialized:
            kernel = triton.jit(kernel.fn)
        self.bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
        self.programs: set[str] = set()
        self.splits: set[int] = set()

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*args: Any, **constants: Any) -> None:
            given, specialization, options = self.bind(*args, **constants)
            self.programs.add(f"{specialization} {options}")
            self.splits.add(given.get("num_splits", 1))

        return launch


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


class AttentionOnly:
    """``Forwards`` of models that attend to grouped heads and to latents, and do nothing else:
    as in a draft decode, lengths may be a row of several chains'."""

    cache, latents, ropes = empty(1, NUM_KV_HEADS, HEAD_DIM), empty(1, 1, RANK), empty(1, 1, ROPE)

    def target(self, rows: Rows, tokens: torch.Tensor, requests: Requests) -> tuple:
        return self.attend(rows.metadata), None

    def mtp(self, rows: Rows, tokens: Any, hidden: Any, last_rows: Any = None) -> tuple:
        return self.attend(rows.metadata), None

    def attend(self, rows: StepMetadata) -> torch.Tensor:
        assert rows.query_len is not None
        num_rows = len(rows.kv_lens) * rows.query_len
        seen = rows.block_table, rows.kv_lens
        sizes = {"query_len": rows.query_len, "page_size": rows.page_size, "scale": 0.1}
        query = empty(num_rows, NUM_HEADS, HEAD_DIM)
        attention.paged_gqa(query, self.cache, self.cache, *seen, **sizes)
        for heads in LATENT_HEADS:
            parts = {"query_rope": empty(num_rows, heads, ROPE), "rope_cache": self.ropes}
            query = empty(num_rows, heads, RANK)
            attention.paged_mla(query, self.latents, *seen, kv_lora_rank=RANK, **sizes, **parts)
        return torch.empty(0)


def verify_chain(sampled: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Nothing is computed: accepted lengths are put in by hand."""
    return chain.verify_chain(sampled, drafts).fill_(1)


def propose(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(positions)


def run_step(phases: LaunchedPhases, batch_size: int, num_pages: int, table: torch.Tensor) -> None:
    """What a step of ``batch_size`` requests launches outside of its graphs."""
    lens = torch.ones(batch_size, dtype=torch.int64)
    tokens = torch.zeros(batch_size, NUM_STEPS + 1, dtype=torch.int64)
    phases.prepare(tokens, Requests(lens, lens, table, num_pages * PAGE_SIZE, PAGE_SIZE))
    phases.verify()
    phases.draft(tokens, verify_chain(tokens, tokens[:, 1:]), lens)


def filter_rows(batch_size: int) -> None:
    num_rows = batch_size * (NUM_STEPS + 1)
    ones, logits = torch.ones(num_rows), torch.zeros(num_rows, VOCAB_SIZE)
    sampling.filter_probs(logits, ones[:, None], ones.int(), ones, ones)


def main() -> None:
    threshold.Kept.checked_on_host = lambda kept: kept  # nothing was computed
    step.chain, captured.chain = chain, SimpleNamespace(verify_chain=verify_chain)
    captured.sampling = SimpleNamespace(filter_probs=sampling.filter_probs)
    tiles.MACHINES["cpu"] = tiles.ASCEND
    kernels = {name: Launches(module, name, "specialized" in sys.argv) for module, name in KERNELS}
    constants = StepConstants(NUM_STEPS, max(BATCHES), "cpu")
    phases = LaunchedPhases(AttentionOnly(), propose, constants)
    req_to_token = torch.zeros(256, 40960, dtype=torch.int32)
    choose = attention.choose_num_splits
    if sys.argv[-1].startswith("splits="):
        only = int(sys.argv[-1].removeprefix("splits="))
        attention.choose_num_splits = lambda *_: only
    captured.warm_up(phases, constants, req_to_token, PAGE_SIZE, VOCAB_SIZE)
    attention.choose_num_splits = choose
    at_start = {name: set(launches.programs) for name, launches in kernels.items()}
    for batch_size in BATCHES:
        filter_rows(batch_size)
        for num_pages in NUM_PAGES:
            run_step(phases, batch_size, num_pages, req_to_token)
    later = {name: len(launches.programs - at_start[name]) for name, launches in kernels.items()}
    splits = sorted(set().union(*(launches.splits for launches in kernels.values())))
    found = {"at_start": {n: len(of) for n, of in at_start.items()}, "later": later}
    print(json.dumps(found | {"splits": splits}))


if __name__ == "__main__":
    main()
