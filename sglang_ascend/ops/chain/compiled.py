"""The chain operators on CPU, one compiled loop each: PyTorch needs several operations, whose
dispatch costs more than their work.
"""

from __future__ import annotations

import torch

from sglang_ascend.ops.chain.reference import StepInputs, TailInputs


def prepare_step(
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    offsets: torch.Tensor,
    max_kv_len: int,
    page_size: int = 1,
) -> StepInputs:
    from sglang_ascend.ops.chain import kernels

    batch_size, num_draft_tokens = len(seq_lens), len(offsets) // 2 + 1
    inputs = StepInputs(
        positions=torch.empty(batch_size * num_draft_tokens, dtype=torch.int64),
        row_slots=torch.empty(batch_size * num_draft_tokens, dtype=torch.int64),
        slots=torch.empty(batch_size, len(offsets), dtype=torch.int64),
        kv_lens=torch.empty(batch_size, dtype=torch.int64),
        block_table=torch.empty(batch_size, -(-max_kv_len // page_size), dtype=torch.int64),
        page_size=page_size,
    )
    kernels.prepare_step(
        seq_lens.numpy(),
        req_pool_indices.numpy(),
        req_to_token.numpy(),
        num_draft_tokens,
        page_size,
        inputs.positions.numpy(),
        inputs.row_slots.numpy(),
        inputs.slots.numpy(),
        inputs.kv_lens.numpy(),
        inputs.block_table.numpy(),
    )
    return inputs


def verify_chain(sampled: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    from sglang_ascend.ops.chain import kernels

    accept_lens = torch.empty(len(sampled), dtype=torch.int32)
    kernels.verify_chain(sampled.numpy(), draft_tokens.numpy(), accept_lens.numpy())
    return accept_lens


def place_tail(
    new_seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
) -> TailInputs:
    from sglang_ascend.ops.chain import kernels

    shape = (len(offsets), len(new_seq_lens))
    tail = TailInputs(*(torch.empty(shape, dtype=torch.int64) for _ in range(3)))
    kernels.place_tail(
        new_seq_lens.numpy(),
        accept_lens.numpy(),
        slots.numpy(),
        tail.positions.numpy(),
        tail.slots.numpy(),
        tail.kv_lens.numpy(),
    )
    return tail
