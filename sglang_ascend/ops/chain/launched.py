"""The chain operators on devices with Triton: one launch, no synchronisation."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from sglang_ascend.ops.chain.reference import StepInputs

BLOCK = 1024


def is_available() -> bool:
    return find_spec("triton") is not None


def prepare_step(
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    offsets: torch.Tensor,
    max_kv_len: int,
) -> StepInputs:
    from sglang_ascend.ops.chain import triton_kernels

    batch_size, num_steps = len(seq_lens), len(offsets) // 2

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=seq_lens.device)

    inputs = StepInputs(
        positions=empty(batch_size * (num_steps + 1)),
        row_slots=empty(batch_size * (num_steps + 1)),
        slots=empty(batch_size, 2 * num_steps),
        kv_lens=empty(batch_size),
        block_table=empty(batch_size, max_kv_len),
    )
    constants: dict[str, Any] = {
        "NUM_STEPS": num_steps,
        "WINDOW": 1 << (2 * num_steps - 1).bit_length(),
        "BLOCK": BLOCK,
    }
    if batch_size:
        triton_kernels.prepare_step[(batch_size,)](
            seq_lens,
            req_pool_indices,
            req_to_token,
            inputs.positions,
            inputs.row_slots,
            inputs.slots,
            inputs.kv_lens,
            inputs.block_table,
            req_to_token.stride(0),
            max_kv_len,
            **constants,
        )
    return inputs


def accepts(
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    offsets: torch.Tensor,
    max_kv_len: int,
) -> bool:
    """Contiguous slot lists; the kernel adds to raw pointers."""
    return req_to_token.stride(1) == 1 and seq_lens.is_contiguous()
