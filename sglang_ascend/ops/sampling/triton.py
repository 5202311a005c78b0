"""Top-k, top-p and the joint filters on devices with Triton: four launches, no synchronisation."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ascend.ops.sampling.numba import DTYPES
from sglang_ascend.ops.sampling.threshold import GROUP_SIZE, Kept

TILE = 64  # groups that a program looks at together: 4096 logits
CAPACITY = 128  # groups that a row's second look takes in one piece; 192 KiB of buffer hold no more
PROGRAMS = 512  # a long row is cut into parts where there are few rows
WARPS = 8


def accepts_rows(logits: torch.Tensor, *tensors: object, joint: bool = False) -> bool:
    """Rows of neighbouring logits, for the kernels add to raw pointers; on the NPU whole groups,
    for a group is read there whatever its mask says."""
    whole = logits.shape[1] % GROUP_SIZE == 0 or logits.device.type != "npu"
    return whole and logits.dtype in DTYPES and logits.stride(1) == 1


def sizes() -> dict[str, Any]:
    return {"GROUP": GROUP_SIZE, "TILE": TILE}


def tiles_of(num_rows: int, num_groups: int) -> tuple[int, int]:
    """(tiles of a row, tiles of each part that one program takes), as static as the shapes."""
    num_tiles = -(-num_groups // TILE)
    return num_tiles, -(-num_tiles // max(1, PROGRAMS // num_rows))


def stream(logits: torch.Tensor, group_max: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes ``group_max``; returns each tile's maximum and mass, float32 [rows, tiles]."""
    from sglang_ascend.ops.sampling import triton_kernels

    num_rows, num_groups = group_max.shape
    num_tiles, tiles_per_part = tiles_of(num_rows, num_groups)
    tile_max, tile_mass = torch.empty(2, num_rows, num_tiles, device=logits.device).unbind()
    triton_kernels.stream[(num_rows, -(-num_tiles // tiles_per_part))](
        logits,
        group_max,
        tile_max,
        tile_mass,
        logits.stride(0),
        logits.shape[1],
        num_groups,
        num_tiles,
        tiles_per_part,
        **sizes(),
    )
    return tile_max, tile_mass


def top_k_top_p(
    logits: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, joint: bool = False
) -> Kept:
    return cut(logits, top_ks, top_ps, joint)[0].checked_on_host()


def cut(
    logits: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, joint: bool
) -> tuple[Kept, torch.Tensor]:
    """What is kept, and the mass of each whole row, float32 [rows]."""
    from sglang_ascend.ops.sampling import triton_kernels

    (num_rows, vocab_size), device = logits.shape, logits.device
    num_groups = -(-vocab_size // GROUP_SIZE)
    threshold, largest, mass, row_mass = torch.empty(4, num_rows, device=device).unbind()
    kept = Kept(threshold, largest, mass, torch.empty(num_rows, num_groups, device=device))
    if not num_rows:
        return kept, row_mass
    tile_max, tile_mass = stream(logits, kept.group_max)
    num_tiles = tile_max.shape[1]
    cuts, counts = torch.empty(2, num_rows, dtype=torch.int32, device=device).unbind()
    candidates = torch.empty(num_rows, CAPACITY, dtype=torch.int32, device=device)
    top_ks = top_ks.contiguous()
    padded: dict[str, Any] = {
        "GROUPS": 1 << (num_groups - 1).bit_length(),
        "TILES": 1 << (num_tiles - 1).bit_length(),
    }
    capacity: dict[str, Any] = {"CAPACITY": CAPACITY, "num_warps": WARPS}
    triton_kernels.bound[(num_rows,)](
        kept.group_max,
        tile_max,
        tile_mass,
        top_ks,
        largest,
        row_mass,
        cuts,
        counts,
        candidates,
        vocab_size,
        num_groups,
        num_tiles,
        **padded,
        **capacity,
    )
    triton_kernels.refine[(num_rows,)](
        logits,
        kept.group_max,
        top_ks,
        top_ps.contiguous(),
        largest,
        row_mass,
        cuts,
        counts,
        candidates,
        threshold,
        mass,
        logits.stride(0),
        vocab_size,
        num_groups,
        **sizes() | {"JOINT": joint},
        **capacity,
    )
    return kept, row_mass


def accepts_filters(logits: torch.Tensor, *filters: torch.Tensor) -> bool:
    return logits.dtype == torch.float32 and accepts_rows(logits)


def filter_probs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """``reference.filter_probs``; a row that nothing can be drawn from is 0 everywhere."""
    from sglang_ascend.ops.sampling import triton_filter_kernels

    logits = logits / temperatures
    kept, row_mass = cut(logits, top_ks, top_ps, joint=True)
    kept.checked_on_host()
    probs = torch.empty_like(logits)
    block: dict[str, Any] = {"BLOCK": TILE * GROUP_SIZE}
    triton_filter_kernels.weigh[(len(logits),)](
        logits,
        kept.threshold,
        kept.max,
        row_mass,
        top_ks.contiguous(),
        top_ps.contiguous(),
        min_ps.contiguous(),
        probs,
        logits.stride(0),
        logits.shape[1],
        **block,
    )
    return probs
