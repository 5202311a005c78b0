"""What a speculative step asks of SGLang's scheduler on an NPU, without stopping the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_reserve_per_decode,
    page_aligned_decode_alloc_lens,
)

from sglang_ascend.plugin.npu.order import to_device
from sglang_ascend.speculative.config import NAME


def reserve_slots(original: Callable[[ScheduleBatch], None], batch: ScheduleBatch) -> None:
    """Around ``eagle_prepare_for_decode``: lengths are copied when a request gets a page, from
    pinned memory.

    SGLang copies both in every step, from memory that is not pinned: torch_npu then waits for the
    stream, twice, although the copies say ``non_blocking``.
    """
    if batch.spec_algorithm.name != NAME:
        return original(batch)
    batch.maybe_evict_swa()
    if batch.sampling_info.penalizer_orchestrator.is_required:
        batch.cumulate_penalty_output_tokens()
    current_lens, next_lens, num_needed_tokens = page_aligned_decode_alloc_lens(
        batch.reqs,
        reserve=get_alloc_reserve_per_decode(),
        page_size=batch.token_to_kv_pool_allocator.page_size,
    )
    for request in batch.reqs:
        request.decode_batch_idx += 1
    if num_needed_tokens == 0:
        return
    host = torch.tensor([current_lens, next_lens], dtype=torch.int32, pin_memory=True)
    device = to_device(host, batch.device)
    alloc_for_spec_decode(
        batch.tree_cache,
        batch.req_to_token_pool,
        reqs=batch.reqs,
        req_pool_indices=batch.req_pool_indices,
        cur_kv_lens=device[0],
        cur_kv_lens_cpu=host[0],
        nxt_kv_lens=device[1],
        nxt_kv_lens_cpu=host[1],
        num_needed_tokens=num_needed_tokens,
        batch=batch,
    )


def count_pages_on_host(
    original: Callable[..., torch.Tensor | None],
    self: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> torch.Tensor | None:
    """Around ``NPUPagedTokenToKVPoolAllocator.alloc_extend``, which asks the device how many pages
    begin between two lengths that the host has, too."""
    if num_new_pages is None:
        pages = (lens + self.roundup for lens in (seq_lens_cpu, prefix_lens_cpu))
        ends, starts = (lens // self.page_size for lens in pages)
        num_new_pages = int((ends - starts).sum())
    lens = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu
    return original(self, *lens, last_loc, extend_num_tokens, num_new_pages)
