"""Python runs this at start when the folder is on PYTHONPATH: `sampling_seed` on the CPU.

SGLang draws from a seed in PyTorch, but hashes the seed in a kernel that CPU wheels lack and, in
its deterministic mode, replaces matrix products by Triton ones. The hash is written out here.
"""

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

MASK = 0xFFFFFFFF


def rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & MASK


def mix(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    key = rotate_left((key * 0xCC9E2D51) & MASK, 15) * 0x1B873593 & MASK
    return (rotate_left(state ^ key, 13) * 5 + 0xE6546B64) & MASK


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 of (seed, position, column): int64 [rows, columns] below 2^32."""
    seed = seed.to(torch.int64)
    state = mix(torch.zeros_like(seed), seed & MASK)
    state = mix(state, (seed >> 32) & MASK)
    state = mix(state, positions.to(torch.int64) & MASK)
    state = mix(state[:, None], col_indices.to(torch.int64)[None]) ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B & MASK
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & MASK
    return state ^ (state >> 16)


def keep_torch_products(self: Any) -> None:
    """One request's sums do not depend on its neighbours by more than fp32 rounding."""


HookRegistry.register(
    "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", murmur_hash32, HookType.REPLACE
)
HookRegistry.register(
    "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
    keep_torch_products,
    HookType.REPLACE,
)
