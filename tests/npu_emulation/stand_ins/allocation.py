"""Places in the paged KV pool."""

from __future__ import annotations

from torch import Tensor

from npu_emulation.stand_ins.kernels import custom_operator, kernel, launch

STAND_INS = (
    (
        "`sgl_kernel_npu.mem_cache.allocator.alloc_extend_kernel`",
        "`srt/hardware_backend/npu/allocator_npu.py`",
        "a loop over tokens",
    ),
    (
        "`torch.ops.npu.cache_loc_update`",
        "`kernels/ops/speculative/cache_locs.py`",
        "a loop over requests",
    ),
)


@kernel("mem_cache.allocator.alloc_extend_kernel")
def alloc_extend_kernel(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    out_indices: Tensor,
    padded_batch: int,
    page_size: int,
    max_num_extend_tokens: int,
) -> None:
    def compute(starts: Tensor, ends: Tensor, last: Tensor, free: Tensor, out: Tensor) -> None:
        places, pages = [], iter(free.tolist())
        for start, end, place in zip(starts.tolist(), ends.tolist(), last.tolist(), strict=True):
            for position in range(start, end):
                place = next(pages) * page_size if position % page_size == 0 else place + 1
                places.append(place)
        out[: len(places)] = out.new_tensor(places)

    launch("alloc_extend_kernel", compute, prefix_lens, seq_lens, last_loc, free_pages, out_indices)


@custom_operator(
    "cache_loc_update(Tensor req_pool_indices, Tensor req_to_token, Tensor start_offset, "
    "Tensor end_offset, Tensor(a!) out_cache_loc) -> ()"
)
def cache_loc_update(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
) -> None:
    written = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        out_cache_loc[written : written + end - start] = req_to_token[row, start:end]
        written += end - start
