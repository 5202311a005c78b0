"""Launches of the chain kernels; the oracles go one request and one position at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from launches import Launch

UNWRITTEN = -7


def unwritten(*shape: int) -> torch.Tensor:
    return torch.full(shape, UNWRITTEN)


def prepare_step(num_steps: int, changes: Sequence[tuple[str, str]]) -> Launch:
    """Pages of 16: one table ends inside the kernel's second block of 1024 pages, and one request
    begins a page."""
    starts, rows = [1, 0, 33, 16400, 34], [5, 0, 7, 2, 3]
    num_slots = max(1, 2 * num_steps)
    page_size, num_pages, batch_size = 16, 1030, 5
    max_context_len = num_pages * page_size - 7
    generator = torch.Generator().manual_seed(1)
    lists = torch.randperm(8 * max_context_len, generator=generator).view(8, -1).int()
    positions = [[start + j for j in range(num_steps + 1)] for start in starts]
    of_row = [lists[row].tolist() for row in rows]
    row_slots = [[of_row[i][p] for p in positions[i]] for i in range(batch_size)]
    slots = [[of_row[i][start + j] for j in range(num_slots)] for i, start in enumerate(starts)]
    kv_lens = [start + num_steps + 1 for start in starts]
    firsts = [i * page_size for i in range(num_pages)]
    block_table = [
        [listed[p] // page_size if p < start + num_slots else 0 for p in firsts]
        for start, listed in zip(starts, of_row, strict=True)
    ]
    expected = [torch.tensor(rows) for rows in (positions, row_slots, slots, kv_lens, block_table)]
    outputs = [unwritten(*tensor.shape) for tensor in expected]
    inputs = torch.tensor(starts), torch.tensor(rows), lists
    return Launch(
        (batch_size,),
        (*inputs, *outputs, max_context_len, num_pages),
        dict(enumerate(expected, start=len(inputs))),
        changes,
    )


PREPARED_WITH_DRAFTS = (
    ("arith.addi %3, %c4_i64", "arith.subi %3, %c4_i64"),  # kv_lens
    ("arith.addi %18, %9", "arith.subi %18, %9"),  # positions
    ("%arg15, %c6_i32", "%arg15, %c4_i32"),  # slots
    ("arith.addi %6, %3", "arith.addi %6, %6"),  # row_slots
    ("arith.addi %17, %c21_i32", "arith.addi %17, %c4_i32"),  # how many pages are its own
    ("arith.muli %30, %c16", "arith.addi %30, %c16"),  # the first slot of a page
    ("arith.divsi %39", "arith.addi %39"),  # its page
)
PREPARED_WITHOUT = (
    ("arith.addi %3, %c1_i64", "arith.subi %3, %c1_i64"),  # kv_lens
    ("tensor.insert %13 into", "tensor.insert %4 into"),  # positions
    ("arith.addi %6, %3", "arith.addi %6, %6"),  # slots and row_slots
    ("arith.addi %12, %c16_i32", "arith.addi %12, %c0_i32"),  # how many pages are its own
    ("arith.muli %22, %c16", "arith.addi %22, %c16"),  # the first slot of a page
    ("arith.divsi %31", "arith.addi %31"),  # its page
)


def verify_chain() -> Launch:
    """Every place of the first draft that differs, in more requests than one program takes."""
    batch_size, num_steps = 40, 3
    generator = torch.Generator().manual_seed(2)
    sampled = torch.randint(0, 3, (batch_size, num_steps + 1), generator=generator)
    drafted = torch.randint(0, 3, (batch_size, num_steps), generator=generator)
    lengths = []
    for drawn, drafts in zip(sampled.tolist(), drafted.tolist(), strict=True):
        kept = 0
        while kept < num_steps and drawn[kept] == drafts[kept]:
            kept += 1
        lengths.append(kept + 1)
    assert set(lengths) == {1, 2, 3, 4}
    output = unwritten(batch_size).int()
    return Launch(
        (2,),
        (sampled, drafted, output, num_steps + 1, num_steps, batch_size),
        {2: torch.tensor(lengths, dtype=torch.int32)},
        (("arith.minsi %in", "arith.maxsi %in"), ("arith.cmpi ne", "arith.cmpi eq")),
    )


def place_draft_decode() -> Launch:
    num_drafts, accept_lens, new_seq_lens = 2, [1, 4, 3], [5, 17, 1029]
    slots = torch.randperm(100, generator=torch.Generator().manual_seed(3))[:18].view(3, 6)
    columns = list(zip(new_seq_lens, accept_lens, slots.tolist(), strict=True))
    positions = [[start + j for start, _, _ in columns] for j in range(num_drafts)]
    places = [[row[accepted + j] for _, accepted, row in columns] for j in range(num_drafts)]
    kv_lens = [[start + j + 1 for start, _, _ in columns] for j in range(num_drafts)]
    expected = [torch.tensor(rows) for rows in (positions, places, kv_lens)]
    inputs = torch.tensor(new_seq_lens), torch.tensor(accept_lens, dtype=torch.int32), slots
    return Launch(
        (len(columns),),
        (*inputs, *(unwritten(num_drafts, len(columns)) for _ in expected), len(columns), 6),
        dict(enumerate(expected, start=len(inputs))),
        (("arith.addi", "arith.subi"), ("arith.muli", "arith.addi")),
    )


LAUNCHES = {
    "prepare_step K=3": partial(prepare_step, 3, PREPARED_WITH_DRAFTS),
    "prepare_step K=0": partial(prepare_step, 0, PREPARED_WITHOUT),
    "verify_chain K=3": verify_chain,
    "place_draft_decode K=3": place_draft_decode,
}
