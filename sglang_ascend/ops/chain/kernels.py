"""Loops of the chain operators, compiled by Numba; the compiled code is kept beside this file."""

from __future__ import annotations

from numba import njit


@njit(cache=True)
def prepare_step(
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
        for page in range(block_table.shape[1]):
            block_table[request, page] = req_to_token[row, page * page_size] // page_size
        kv_lens[request] = start + num_draft_tokens
        for j in range(slots.shape[1]):
            slots[request, j] = req_to_token[row, start + j]
        first = request * num_draft_tokens
        for j in range(num_draft_tokens):
            positions[first + j] = start + j
            row_slots[first + j] = slots[request, j]


@njit(cache=True)
def verify_chain(sampled, draft_tokens, accept_lens):
    for request in range(sampled.shape[0]):
        accepted = 0
        while (
            accepted < draft_tokens.shape[1]
            and draft_tokens[request, accepted] == sampled[request, accepted]
        ):
            accepted += 1
        accept_lens[request] = accepted + 1


@njit(cache=True)
def place_tail(new_seq_lens, accept_lens, slots, positions, tail_slots, kv_lens):
    for j in range(positions.shape[0]):
        for request in range(positions.shape[1]):
            position = new_seq_lens[request] + j
            positions[j, request] = position
            tail_slots[j, request] = slots[request, accept_lens[request] + j]
            kv_lens[j, request] = position + 1
