"""The chain operators on CPU, one compiled loop each: PyTorch needs several operations, whose
dispatch costs more than their work.
"""

from __future__ import annotations

import numpy as np
import torch

from sglang_ascend.ops.chain.reference import DraftDecodeInputs, StepInputs
from sglang_ascend.ops.numba_cache import njit


@njit
def _fill_step(
    seq_lens,
    req_pool_indices,
    req_to_token,
    num_draft_tokens,
    page_size,
    positions,
    row_slots,
    slots,
    kv_lens,
    block_table,
):
    for request in range(len(seq_lens)):
        row, start = req_pool_indices[request], seq_lens[request]
        own_pages = min(-(-(start + slots.shape[1]) // page_size), block_table.shape[1])
        for page in range(own_pages):
            block_table[request, page] = req_to_token[row, page * page_size] // page_size
        block_table[request, own_pages:] = 0
        kv_lens[request] = start + num_draft_tokens
        for j in range(slots.shape[1]):
            slots[request, j] = req_to_token[row, start + j]
        first = request * num_draft_tokens
        for j in range(num_draft_tokens):
            positions[first + j] = start + j
            row_slots[first + j] = slots[request, j]


def prepare_step(
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    offsets: torch.Tensor,
    max_kv_len: int,
    page_size: int = 1,
) -> StepInputs:
    batch_size, num_draft_tokens = len(seq_lens), len(offsets) // 2 + 1
    inputs = StepInputs(
        positions=torch.empty(batch_size * num_draft_tokens, dtype=torch.int64),
        row_slots=torch.empty(batch_size * num_draft_tokens, dtype=torch.int64),
        slots=torch.empty(batch_size, len(offsets), dtype=torch.int64),
        kv_lens=torch.empty(batch_size, dtype=torch.int64),
        block_table=torch.empty(batch_size, -(-max_kv_len // page_size), dtype=torch.int64),
        page_size=page_size,
    )
    _fill_step(
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


@njit
def _count_kept(sampled, draft_tokens, accept_lens):
    for request in range(sampled.shape[0]):
        accepted = 0
        while (
            accepted < draft_tokens.shape[1]
            and draft_tokens[request, accepted] == sampled[request, accepted]
        ):
            accepted += 1
        accept_lens[request] = accepted + 1


def verify_chain(sampled: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    accept_lens = torch.empty(len(sampled), dtype=torch.int32)
    _count_kept(sampled.numpy(), draft_tokens.numpy(), accept_lens.numpy())
    return accept_lens


@njit
def _fill_draft_decode(new_seq_lens, accept_lens, slots, positions, draft_slots, kv_lens):
    for j in range(positions.shape[0]):
        for request in range(positions.shape[1]):
            position = new_seq_lens[request] + j
            positions[j, request] = position
            draft_slots[j, request] = slots[request, accept_lens[request] + j]
            kv_lens[j, request] = position + 1


def place_draft_decode(
    new_seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
) -> DraftDecodeInputs:
    shape = (len(offsets) - 1, len(new_seq_lens))
    rows = DraftDecodeInputs(*(torch.empty(shape, dtype=torch.int64) for _ in range(3)))
    _fill_draft_decode(
        new_seq_lens.numpy(),
        accept_lens.numpy(),
        slots.numpy(),
        rows.positions.numpy(),
        rows.slots.numpy(),
        rows.kv_lens.numpy(),
    )
    return rows


@njit
def _look_up(tokens, rows, lens, min_match, max_match, drafts, matched):
    for request in range(len(rows)):
        row, last = tokens[rows[request]], lens[request] - 1
        start, longest = last, min_match - 1
        for place in range(last - 1, -1, -1):
            if row[place] != row[last]:
                continue
            length = 1
            while (
                length < max_match and length <= place and row[place - length] == row[last - length]
            ):
                length += 1
            if length > longest:
                start, longest = place + 1, length
                if length == max_match:
                    break
        matched[request] = longest if longest >= min_match else 0
        for j in range(drafts.shape[1]):
            drafts[request, j] = row[start + j % (last + 1 - start)]


def look_up(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    num_drafts: int,
    min_match: int,
    max_match: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    drafts = torch.empty(len(rows), num_drafts, dtype=torch.int64)
    matched = torch.empty(len(rows), dtype=torch.int64)
    _look_up(
        tokens.numpy(),
        rows.numpy(),
        lens.numpy(),
        min_match,
        max_match,
        drafts.numpy(),
        matched.numpy(),
    )
    return drafts, matched


@njit
def _extend_context(ring, num_written, is_unlisted, rows, tokens, num_kept):
    most, total = ring.shape[1], 0
    for request in range(len(rows)):
        row = rows[request]
        for j in range(num_kept[request]):
            token = tokens[request, j]
            if is_unlisted[token]:
                ring[row, num_written[row] % most] = token
                num_written[row] += 1
        total += min(num_written[row], most)
    places, found = np.empty(total, np.int64), np.empty(total, np.int64)
    n = 0
    for request in range(len(rows)):
        row = rows[request]
        for column in range(min(num_written[row], most)):
            places[n], found[n] = request, ring[row, column]
            n += 1
    return places, found


def extend_context(
    ring: torch.Tensor,
    num_written: torch.Tensor,
    is_unlisted: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    num_kept: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    places, found = _extend_context(
        ring.numpy(),
        num_written.numpy(),
        is_unlisted.numpy(),
        rows.numpy(),
        tokens.numpy(),
        num_kept.numpy(),
    )
    return torch.from_numpy(places), torch.from_numpy(found)
