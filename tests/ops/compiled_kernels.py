"""Prints how many programs Triton would compile, kernel by kernel, for steps of many sizes, and how
many of them the warm-up at start leaves for later. The argument `specialized` is the control: the
same kernels without a word on what not to specialize.

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

from sglang_ascend.ops.chain import triton as chain
from sglang_ascend.ops.chain import triton_kernels as chain_kernels
from sglang_ascend.ops.sampling import threshold, triton_filter_kernels, triton_kernels
from sglang_ascend.ops.sampling import triton as sampling
from sglang_ascend.speculative import captured
from sglang_ascend.speculative.step import StepConstants

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
NUM_STEPS, VOCAB_SIZE, PAGE_SIZE = 2, 20000, 16  # rows of a step: no multiple of 16 bytes
BATCHES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 100, 128, 160)
KERNELS = (
    (chain_kernels, "prepare_step"),
    (chain_kernels, "verify_chain"),
    (chain_kernels, "place_draft_decode"),
    (triton_kernels, "stream"),
    (triton_kernels, "bound"),
    (triton_kernels, "refine"),
    (triton_filter_kernels, "weigh"),
)


class Launches:
    """Stands where a kernel does; notes what each launch would be compiled for."""

    def __init__(self, module: ModuleType, name: str, specialized: bool) -> None:
        kernel = getattr(module, name)
        setattr(module, name, self)
        if specialized:
            kernel = triton.jit(kernel.fn)
        self.bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
        self.programs: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*args: Any, **constants: Any) -> None:
            _, specialization, options = self.bind(*args, **constants)
            self.programs.add(f"{specialization} {options}")

        return launch


def run_step(batch_size: int, constants: StepConstants, req_to_token: torch.Tensor) -> None:
    """The launches of a step of ``batch_size`` requests that are all filtered."""
    lens = torch.ones(batch_size, dtype=torch.int64)
    longest = 70 * batch_size
    inputs = chain.prepare_step(lens, lens, req_to_token, constants.window, longest, PAGE_SIZE)
    tokens = torch.zeros(batch_size, NUM_STEPS + 1, dtype=torch.int64)
    accept_lens = chain.verify_chain(tokens, tokens[:, 1:])
    chain.place_draft_decode(lens, accept_lens, inputs.slots, constants.draft_decode)
    num_rows = batch_size * (NUM_STEPS + 1)
    ones, logits = torch.ones(num_rows), torch.zeros(num_rows, VOCAB_SIZE)
    sampling.filter_probs(logits, ones[:, None], ones.int(), ones, ones)


def main() -> None:
    threshold.Kept.checked_on_host = lambda kept: kept  # nothing was computed
    captured.chain, captured.sampling = chain, SimpleNamespace(filter_probs=sampling.filter_probs)
    specialized = "specialized" in sys.argv
    kernels = {name: Launches(module, name, specialized) for module, name in KERNELS}
    constants = StepConstants(NUM_STEPS, max(BATCHES), "cpu")
    req_to_token = torch.zeros(256, 40960, dtype=torch.int32)
    captured.warm_up(constants, req_to_token, PAGE_SIZE, VOCAB_SIZE)
    at_start = {name: set(launches.programs) for name, launches in kernels.items()}
    for batch_size in BATCHES:
        run_step(batch_size, constants, req_to_token)
    later = {name: len(launches.programs - at_start[name]) for name, launches in kernels.items()}
    print(json.dumps({"at_start": {n: len(of) for n, of in at_start.items()}, "later": later}))


if __name__ == "__main__":
    main()
