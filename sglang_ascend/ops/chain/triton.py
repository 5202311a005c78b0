"""The chain operators on devices with Triton: one launch, no synchronisation."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ascend.ops.chain.reference import DraftDecodeInputs, StepInputs

BLOCK = 1024
# Per program: K tokens of one request would leave a vector unit idle.
VERIFIED_REQUESTS = 32


def window_of(num_tokens: int) -> int:
    """The power of two that a vector of ``num_tokens`` is padded to."""
    return 1 << max(0, num_tokens - 1).bit_length()


def prepare_step(
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    offsets: torch.Tensor,
    max_kv_len: int,
    page_size: int = 1,
) -> StepInputs:
    from sglang_ascend.ops.chain import triton_kernels

    batch_size, num_steps = len(seq_lens), len(offsets) // 2
    num_pages = -(-max_kv_len // page_size)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=seq_lens.device)

    inputs = StepInputs(
        positions=empty(batch_size * (num_steps + 1)),
        row_slots=empty(batch_size * (num_steps + 1)),
        slots=empty(batch_size, len(offsets)),
        kv_lens=empty(batch_size),
        block_table=empty(batch_size, num_pages),
        page_size=page_size,
    )
    constants: dict[str, Any] = {
        "NUM_STEPS": num_steps,
        "NUM_SLOTS": len(offsets),
        "WINDOW": window_of(len(offsets)),
        "PAGE_SIZE": page_size,
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
            num_pages,
            **constants,
        )
    return inputs


def accepts_prepare_step(
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    offsets: torch.Tensor,
    max_kv_len: int,
    page_size: int = 1,
) -> bool:
    """Contiguous slot lists; the kernel adds to raw pointers."""
    return req_to_token.stride(1) == 1 and seq_lens.is_contiguous()


def verify_chain(sampled: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    from sglang_ascend.ops.chain import triton_kernels

    batch_size, num_steps = draft_tokens.shape
    accept_lens = torch.empty(batch_size, dtype=torch.int32, device=sampled.device)
    if num_steps == 0:
        return accept_lens.fill_(1)
    constants: dict[str, Any] = {
        "NUM_STEPS": num_steps,
        "WINDOW": window_of(num_steps),
        "REQUESTS": VERIFIED_REQUESTS,
    }
    if batch_size:
        triton_kernels.verify_chain[(-(-batch_size // VERIFIED_REQUESTS),)](
            sampled,
            draft_tokens,
            accept_lens,
            sampled.stride(0),
            draft_tokens.stride(0),
            batch_size,
            **constants,
        )
    return accept_lens


def accepts_verify_chain(sampled: torch.Tensor, draft_tokens: torch.Tensor) -> bool:
    """Rows whose tokens lie one behind another, at any distance between rows."""
    return sampled.stride(1) == 1 and draft_tokens.stride(1) == 1


def place_draft_decode(
    new_seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
) -> DraftDecodeInputs:
    from sglang_ascend.ops.chain import triton_kernels

    num_drafts, batch_size = len(offsets) - 1, len(new_seq_lens)
    rows = DraftDecodeInputs(
        *(
            torch.empty(num_drafts, batch_size, dtype=torch.int64, device=slots.device)
            for _ in range(3)
        )
    )
    constants: dict[str, Any] = {"NUM_DRAFTS": num_drafts, "WINDOW": window_of(num_drafts)}
    if num_drafts and batch_size:
        triton_kernels.place_draft_decode[(batch_size,)](
            new_seq_lens,
            accept_lens,
            slots,
            rows.positions,
            rows.slots,
            rows.kv_lens,
            batch_size,
            slots.shape[1],
            **constants,
        )
    return rows


def accepts_place_draft_decode(
    new_seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
) -> bool:
    """Contiguous lengths and slots; the kernel adds to raw pointers."""
    return all(tensor.is_contiguous() for tensor in (new_seq_lens, accept_lens, slots))
