"""Tile sizes and split counts of the attention kernels: the limits and the arithmetic."""

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


@dataclass(frozen=True)
class Machine:
    """What bounds a tile of ``block_m`` query rows and ``block_n`` keys."""

    num_cores: int
    factor_bytes: int  # near memory for query rows and for the tiles of keys in flight
    sum_bytes: int  # for the fp32 sums, [block_m, value width]
    max_block_m: int
    max_block_n: int
    tiles_in_flight: int
    num_stages: int  # of Triton's pipeline
    gathers: bool  # whether a tile may have keys of several pages


# The arithmetic for latent rank 512 and rope 64 in bf16, 64 rows (H = 16) or 512 (H = 128):
# H100: 132 SMs, each 227 KiB of shared memory, of which the rest holds what warps exchange, and
#   256 KiB of registers. M = 64, N = 32. Factors 2 B * 576 * (64 + 3 * 32) = 180 KiB; sums
#   4 B * 64 * 512 = 128 KiB, 128 registers of each thread of 8 warps. The page number of a tile
#   is loaded before the tile, so that it takes five stages to have three tiles in flight.
H100 = Machine(132, 211 << 10, 128 << 10, 64, 64, 3, num_stages=5, gathers=True)
EXCHANGE_BYTES = 16 << 10
# A2 and A3 (910B3, 910_9392): 20 or more AI cores, each 512 KiB of L1 and 192 KiB of UB. M = 16,
#   N = 128, one page. Factors in L1 2 B * 576 * (16 + 2 * 128) = 306 KiB. In UB the sums are
#   4 B * 16 * 512 = 32 KiB, which the compiler keeps several times: bishengir 1.2.0 counts 184 KiB
#   of UB and 314 KiB of L1, and 266 KiB of UB for M = 32. It gathers a tile through UB, 567 KiB.
ASCEND = Machine(20, 384 << 10, 32 << 10, 64, 128, 2, num_stages=2, gathers=False)
# A GPU's own cores and shared memory replace the H100's; "cpu" is Triton's interpreter.
MACHINES = {"npu": ASCEND, "cpu": H100}


def machine_of(device: torch.device) -> Machine:
    return gpu_of(device.index) if device.type == "cuda" else MACHINES[device.type]


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
        sum_width: elements of an output row.
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


def choose_num_splits(machine: Machine, num_programs: int, max_kv_len: int) -> int:
    """Splits of each request's keys: enough for every core, from host bounds alone.

    ``num_programs`` are there without splits, ``max_kv_len`` is what the block table can hold.
    """
    useful = -(-max_kv_len // MIN_KEYS_PER_SPLIT)
    return max(1, min(machine.num_cores // num_programs, useful, MAX_SPLITS))
