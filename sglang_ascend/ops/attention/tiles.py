"""Tiles and splits of the attention kernels: limits, arithmetic, and the splits' results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

# A split shorter than this costs more in its partial result than it saves in time.
MIN_KEYS_PER_SPLIT = 128
MAX_SPLITS = 64
# The units that multiply matrices work on tiles of 16.
MIN_BLOCK = 16
# Columns of the output that one program of the merge writes.
MERGED_COLUMNS = 128
MOST_PROGRAMS = 65535  # of a launch; triton-ascend refuses more


@dataclass(frozen=True)
class Machine:
    """What bounds a tile of ``block_m`` query rows and ``block_n`` keys."""

    num_cores: int
    factor_bytes: int  # near memory for query rows and for the tiles of keys in flight
    sum_bytes: int  # for the fp32 sums, [block_m, value width], or one of their parts
    max_block_m: int
    max_block_n: int
    tiles_in_flight: int
    num_stages: int  # of Triton's pipeline
    gathers: bool  # whether a tile may have keys of several pages
    sum_parts: int  # by columns, of a latent's sums: what is computed of them at once is one part
    near_rows: int  # query rows whose latent sums near memory holds; those of more lie in memory


# The arithmetic for latent rank 512 and rope 64 in bf16, 64 rows (H = 16) or 512 (H = 128):
# H100: 132 SMs, each 227 KiB of shared memory, of which the rest holds what warps exchange, and
#   256 KiB of registers. M = 64, N = 32. Factors 2 B * 576 * (64 + 3 * 32) = 180 KiB; sums
#   4 B * 64 * 512 = 128 KiB, 128 registers of each thread of 8 warps. The page number of a tile
#   is loaded before the tile, so that it takes five stages to have three tiles in flight.
H100 = Machine(
    132, 211 << 10, 128 << 10, 64, 64, 3, 5, gathers=True, sum_parts=1, near_rows=1 << 30
)
EXCHANGE_BYTES = 16 << 10
# A2 and A3 (910B3, 910_9392): 20 or more AI cores, each 512 KiB of L1 and 192 KiB of UB. M = 64,
#   N = 128, one page. Factors in L1 2 B * 576 * (64 + 2 * 128) = 360 KiB. The sums in UB are
#   4 B * 64 * 512 = 128 KiB, half in either vector core. What an operation on them makes is of a
#   part, 4 B * 64 * 128 = 32 KiB: bishengir 1.2.0 counts 192 KiB of UB and 488 KiB of L1, and sums
#   in one piece exceed it at M = 64. It gathers a tile through UB, 567 KiB.
ASCEND = Machine(20, 384 << 10, 32 << 10, 64, 128, 2, 2, gathers=False, sum_parts=4, near_rows=64)
# 950: 248 KiB of UB, of which the sums of 64 rows and their parts would take 338 KiB.
ASCEND_950 = replace(ASCEND, near_rows=32)
# Blocks of rows that take turns at a tile of keys where their sums lie in memory: 256 rows, so
# that 512 (H = 128) read the keys twice and, of 16 requests, are programs for 32 cores.
MAX_TURNS = 4
# A GPU's own cores and shared memory replace the H100's; "cpu" is Triton's interpreter.
MACHINES = {"cpu": H100}


def machine_of(device: torch.device) -> Machine:
    if device.type == "npu":
        return npu_of(device.index)
    return gpu_of(device.index) if device.type == "cuda" else MACHINES[device.type]


@cache
def npu_of(index: int | None) -> Machine:
    npu: Any = torch.get_device_module("npu")
    return ASCEND_950 if npu.get_device_name(index).startswith("Ascend950") else ASCEND


@cache
def gpu_of(index: int) -> Machine:
    from triton.runtime import driver

    active: Any = driver.active
    limits = active.utils.get_device_properties(index)
    return replace(
        H100,
        num_cores=limits["multiprocessor_count"],
        factor_bytes=limits["max_shared_mem"] - EXCHANGE_BYTES,
    )


@dataclass(frozen=True)
class Tiles:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def power_of_2(size: int) -> int:
    """The smallest power of two, and at least ``MIN_BLOCK``, that holds ``size``."""
    return max(MIN_BLOCK, 1 << (size - 1).bit_length())


@cache
def choose_tiles(
    machine: Machine,
    num_rows: int,
    page_size: int,
    query_width: int,
    key_width: int,
    sum_width: int,
    element_size: int,
) -> Tiles | None:
    """The largest tiles within the machine's limits; None where even the smallest exceed them.

    Args:
        num_rows: query rows that share their keys.
        page_size: slots of a page.
        query_width, key_width: elements of a query row, and of what is read of a key.
        sum_width: elements of an output row, or of a part of it.
        element_size: bytes of a factor.
    """
    block_m = min(machine.max_block_m, power_of_2(num_rows))
    block_n = machine.max_block_n
    while not machine.gathers and page_size % block_n:
        block_n //= 2
    while 4 * block_m * sum_width > machine.sum_bytes:
        block_m //= 2
    while min(block_m, block_n) >= MIN_BLOCK:
        query_bytes = element_size * block_m * query_width
        key_bytes = element_size * machine.tiles_in_flight * block_n * key_width
        if query_bytes + key_bytes <= machine.factor_bytes:
            num_warps = 8 if 4 * block_m * sum_width > 64 << 10 else 4
            return Tiles(block_m, block_n, num_warps, machine.num_stages)
        if block_m > MIN_BLOCK and (query_bytes >= key_bytes or block_n == MIN_BLOCK):
            block_m //= 2
        else:
            block_n //= 2
    return None


def part_width(machine: Machine, rank: int) -> int:
    """Columns of a part of a latent's sums."""
    return max(MIN_BLOCK, power_of_2(rank) // machine.sum_parts)


def choose_turns(machine: Machine, num_rows: int, block_m: int) -> int:
    """Blocks of rows that take turns at a tile of keys, with sums in memory; 0: sums stay near."""
    if num_rows <= machine.near_rows:
        return 0
    num_blocks = -(-num_rows // block_m)
    num_programs = -(-num_blocks // MAX_TURNS)
    return -(-num_blocks // num_programs)


def choose_num_splits(machine: Machine, num_programs: int, max_kv_len: int) -> int:
    """Splits of each request's keys: enough for every core, from host bounds alone.

    ``num_programs`` are there without splits, ``max_kv_len`` is what the block table can hold.
    """
    useful = -(-max_kv_len // MIN_KEYS_PER_SPLIT)
    return max(1, min(machine.num_cores // num_programs, useful, MAX_SPLITS))


class Splits:
    """Where a launch leaves the splits' results: in the output itself when there is one split,
    unless the kernel keeps its sums there.

    outputs [rows * heads, num_splits, width] and masses [rows * heads, num_splits] in fp32, by
    request, key head, query and head of its group.
    """

    def __init__(
        self,
        output: torch.Tensor,
        query_len: int,
        num_kv_heads: int,
        num_splits: int,
        in_memory: bool = False,
    ) -> None:
        num_rows, num_heads, width = output.shape
        self.output, self.num_splits = output, num_splits
        self.outputs = output
        shape = (num_rows * num_heads, num_splits)
        self.masses = output.new_empty(shape, dtype=torch.float32)
        if num_splits > 1 or in_memory:
            self.outputs = output.new_empty(*shape, width, dtype=torch.float32)
        self.constants: dict[str, Any] = {
            "QUERY_LEN": query_len,
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": num_heads // num_kv_heads,
            "WIDTH": width,
            # Not of this launch: one program merges any number.
            "BLOCK_SPLITS": power_of_2(min(machine_of(output.device).num_cores, MAX_SPLITS)),
            "BLOCK_WIDTH": MERGED_COLUMNS,
        }

    def merged(self) -> torch.Tensor:
        from sglang_ascend.ops.attention import triton_latent_kernels

        if self.outputs is not self.output:
            num_rows, num_heads, width = self.output.shape
            columns, query_len = -(-width // MERGED_COLUMNS), self.constants["QUERY_LEN"]
            most = max(1, MOST_PROGRAMS // (query_len * num_heads * columns)) * query_len
            for first in range(0, num_rows, most):
                rows = slice(first, first + most)  # of whole requests
                splits = slice(first * num_heads, (first + most) * num_heads)
                outputs, masses = self.outputs[splits], self.masses[splits]
                operands = outputs, masses, self.output[rows], self.num_splits
                grid = len(masses), columns
                triton_latent_kernels.merge_splits[grid](*operands, **self.constants)
        return self.output
