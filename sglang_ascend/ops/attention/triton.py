"""Paged attention on devices with Triton: lengths and pages stay there, nothing synchronises."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ascend.ops.attention.tiles import (
    Splits,
    Tiles,
    choose_num_splits,
    choose_tiles,
    choose_turns,
    machine_of,
    part_width,
    power_of_2,
)

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def operand_type(dtype: torch.dtype) -> Any:
    """Triton's name of the dtype that keys, values and weights are multiplied in: the query's."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def query_parts(
    query: torch.Tensor, query_rope: torch.Tensor | None, kv_lora_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What meets c and what meets r; views of one tensor, or two tensors."""
    if query_rope is None:
        return query[..., :kv_lora_rank], query[..., kv_lora_rank:]
    return query, query_rope


def mla_tiles(
    query: torch.Tensor, query_rope: torch.Tensor, query_len: int, page_size: int
) -> Tiles | None:
    num_rows = query_len * query.shape[1]
    rank, rope = power_of_2(query.shape[2]), power_of_2(query_rope.shape[2])
    machine = machine_of(query.device)
    widths = rank + rope, rank + rope, part_width(machine, rank)
    return choose_tiles(machine, num_rows, page_size, *widths, query.element_size())


def gqa_tiles(
    query: torch.Tensor, query_len: int, page_size: int, num_kv_heads: int
) -> Tiles | None:
    num_rows = query_len * query.shape[1] // num_kv_heads
    dim = power_of_2(query.shape[2])
    widths = dim, 2 * dim, dim  # a key's row and its value's are read together
    machine = machine_of(query.device)
    return choose_tiles(machine, num_rows, page_size, *widths, query.element_size())


def launch_options(
    query: torch.Tensor, tiles: Tiles, query_len: int, page_size: int
) -> dict[str, Any]:
    """The constants that all kernels have."""
    return {
        "QUERY_LEN": query_len,
        "PAGE_SIZE": page_size,
        "OPERAND": operand_type(query.dtype),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def paged_mla(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    query_len: int,
    page_size: int,
    scale: float,
    kv_lora_rank: int,
    rope_cache: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """``reference.paged_mla`` of what ``accepts_mla``; what no request owns is never read.

    A row that sees no key, as in the padding of a captured graph (kv_len 0), is 0.
    """
    batch_size, num_heads = len(kv_lens), query.shape[1]
    output = query.new_empty(len(query), num_heads, kv_lora_rank)
    if not batch_size:
        return output
    query, query_rope = query_parts(query, query_rope, kv_lora_rank)
    tiles = mla_tiles(query, query_rope, query_len, page_size)
    assert tiles is not None, "accepts_mla declines shapes without tiles"
    kernel, turns, constants = mla_kernel(query, query_rope, query_len, tiles)
    num_blocks = -(-query_len * num_heads // (tiles.block_m * max(1, turns)))
    num_splits = num_splits_of(query, block_table, page_size, batch_size * num_blocks)
    splits = Splits(output, query_len, 1, num_splits, in_memory=turns > 0)
    if not turns:
        constants["IS_SPLIT"] = num_splits > 1
    if rope_cache is None:
        rope_cache = latent_cache[..., kv_lora_rank:]
    # Blocks of rows first: those that read the same keys run side by side and share a cache.
    kernel[(num_blocks, splits.num_splits, batch_size)](
        query,
        query_rope,
        latent_cache,
        rope_cache,
        block_table,
        kv_lens,
        splits.outputs,
        splits.masses,
        scale,
        query.stride(1),
        query_rope.stride(1),
        latent_cache.stride(0),
        rope_cache.stride(0),
        block_table.stride(0),
        splits.num_splits,
        **constants,
        **launch_options(query, tiles, query_len, page_size),
    )
    return splits.merged()


def mla_kernel(
    query: torch.Tensor, query_rope: torch.Tensor, query_len: int, tiles: Tiles
) -> tuple[Any, int, dict[str, Any]]:
    """(kernel, turns, constants): the kernel whose sums find room on the device."""
    _, num_heads, rank = query.shape
    rope_dim = query_rope.shape[2]
    constants: dict[str, Any] = {
        "NUM_HEADS": num_heads,
        "RANK": rank,
        "ROPE_DIM": rope_dim,
        "BLOCK_ROPE": power_of_2(rope_dim),
    }
    machine = machine_of(query.device)
    if machine.sum_parts == 1:
        from sglang_ascend.ops.attention import triton_kernels

        return triton_kernels.mla_split, 0, constants | {"BLOCK_RANK": power_of_2(rank)}
    constants["PART"] = part_width(machine, rank)
    turns = choose_turns(machine, query_len * num_heads, tiles.block_m)
    if not turns:
        from sglang_ascend.ops.attention import triton_latent_kernels

        return triton_latent_kernels.mla_in_parts, 0, constants
    from sglang_ascend.ops.attention import triton_memory_kernels

    return triton_memory_kernels.mla_in_memory, turns, constants | {"NUM_BLOCKS": turns}


def paged_gqa(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    query_len: int,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """``reference.paged_gqa`` of what ``accepts_gqa``; otherwise as ``paged_mla``."""
    from sglang_ascend.ops.attention import triton_kernels

    batch_size, num_kv_heads = len(kv_lens), key_cache.shape[1]
    output = torch.empty_like(query)
    if not batch_size:
        return output
    group = query.shape[1] // num_kv_heads
    tiles = gqa_tiles(query, query_len, page_size, num_kv_heads)
    assert tiles is not None, "accepts_gqa declines shapes without tiles"
    num_blocks, num_streams = -(-query_len * group // tiles.block_m), batch_size * num_kv_heads
    num_splits = num_splits_of(query, block_table, page_size, num_streams * num_blocks)
    splits = Splits(output, query_len, num_kv_heads, num_splits)
    constants: dict[str, Any] = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": query.shape[2],
        "BLOCK_DIM": power_of_2(query.shape[2]),
        "IS_SPLIT": num_splits > 1,
    }
    triton_kernels.gqa_split[(num_blocks, splits.num_splits, num_streams)](
        query,
        key_cache,
        value_cache,
        block_table,
        kv_lens,
        splits.outputs,
        splits.masses,
        scale,
        key_cache.stride(0),
        value_cache.stride(0),
        block_table.stride(0),
        splits.num_splits,
        **constants,
        **launch_options(query, tiles, query_len, page_size),
    )
    return splits.merged()


def num_splits_of(
    query: torch.Tensor, block_table: torch.Tensor, page_size: int, num_programs: int
) -> int:
    max_kv_len = block_table.shape[1] * page_size
    return choose_num_splits(machine_of(query.device), num_programs, max_kv_len)


def accepts_mla(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    query_len: int,
    page_size: int,
    scale: float,
    kv_lora_rank: int,
    rope_cache: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
) -> bool:
    """Contiguous queries, unbroken latent and rope rows at any distance, all on one device."""
    queries = (query,) if query_rope is None else (query, query_rope)
    caches = (latent_cache,) if rope_cache is None else (latent_cache, rope_cache)
    return (
        are_readable(queries, caches, block_table, kv_lens)
        and sum(part.shape[2] for part in caches) == sum(part.shape[2] for part in queries)
        and mla_tiles(*query_parts(query, query_rope, kv_lora_rank), query_len, page_size)
        is not None
    )


def accepts_gqa(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    query_len: int,
    page_size: int,
    scale: float,
) -> bool:
    """Contiguous queries, the heads of a slot one behind another, all on one device."""
    return (
        are_readable((query,), (key_cache, value_cache), block_table, kv_lens)
        and key_cache.shape[2] == value_cache.shape[2] == query.shape[2]
        and gqa_tiles(query, query_len, page_size, key_cache.shape[1]) is not None
    )


def are_readable(
    queries: tuple[torch.Tensor, ...],
    caches: tuple[torch.Tensor, ...],
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
) -> bool:
    """Whether the kernels' raw pointers find every element, in a dtype that they multiply."""
    tensors = (*queries, *caches, block_table, kv_lens)
    return (
        all(tensor.device == queries[0].device for tensor in tensors)
        and all(query.is_contiguous() for query in queries)
        and kv_lens.is_contiguous()
        and block_table.stride(1) == 1
        and all(query.dtype in DTYPES for query in queries)
        and all(
            cache.dtype in DTYPES
            and cache.stride(2) == 1
            and (cache.shape[1] == 1 or cache.stride(1) == cache.shape[2])
            for cache in caches
        )
    )
