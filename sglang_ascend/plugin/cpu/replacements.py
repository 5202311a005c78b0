"""What the CPU puts in place of SGLang functions that need Triton or torch_npu."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from sglang_ascend.ops import slots


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Writes ``out_cache_loc`` into positions [start, end) of each request's row."""
    slots.assign_slots(req_to_token, req_pool_indices, start_offset, end_offset, out_cache_loc)


@cache
def register_collectives() -> torch.library.Library:
    """Collectives of rows for a CPU: an out-of-tree platform's are registered for PrivateUse1."""
    from sglang.srt.distributed import parallel_state

    library = torch.library.Library("sglang", "IMPL")
    for name in ("reg_all_gather_into_tensor", "reg_reduce_scatter_tensor"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"sglang::{name}", "CPU"):
            library.impl(name, inspect.unwrap(getattr(parallel_state, name)), "CPU")
    return library


def copy_rows(
    dst: torch.Tensor,
    src: torch.Tensor,
    dim: int,
    offset: torch.Tensor,
    sz: torch.Tensor,
    offset_src: bool,
) -> None:
    """``sz`` rows of one rank from ``offset`` on in those of all ranks, or back."""
    from sglang.srt.layers.dp_attention import memcpy_cpu

    memcpy_cpu(dst, src, dim, offset, sz, offset_src)


def pad_without_pinning(original: Callable[..., None], self: Any, model_runner: Any) -> None:
    """``ForwardBatch.prepare_mlp_sync_batch``, which pins memory unless its module knows a CPU."""
    from sglang.srt.model_executor import forward_batch_info

    forward_batch_info._is_cpu = True
    original(self, model_runner)


def gather_side_by_side(
    original: Callable[..., None], self: Any, output: torch.Tensor, input: torch.Tensor
) -> None:
    """``GroupCoordinator._all_gather_into_tensor``, called for [ranks, *rows] too, which NCCL fills
    as it does [ranks * rows[0], ...]; gloo asks for parts of ``input``'s own shape."""
    original(self, output.view(-1, *input.shape[1:]), input)


def hold_the_reserve(original: Callable[[], int]) -> int:
    """``get_req_to_token_extra_context_len``: slots of a request's row beyond the context."""
    from sglang.srt.mem_cache import allocation_sizing

    reserve = allocation_sizing.get_alloc_reserve_per_decode()
    return max(original(), reserve + allocation_sizing.get_alloc_page_size() - 1)
