"""Launches of the chain kernels; the oracles go one request and one position at a time."""

from __future__ import annotations

import torch
from launches import Launch

UNWRITTEN = -7


def unwritten(*shape: int) -> torch.Tensor:
    return torch.full(shape, UNWRITTEN)


def prepare_step() -> Launch:
    """K = 3; one table ends inside the kernel's first block of 1024 positions, none at its end."""
    starts, rows, num_steps = [1, 0, 33, 1029, 34], [5, 0, 7, 2, 3], 3
    max_context_len, max_kv_len, batch_size = 1100, 1040, 5
    generator = torch.Generator().manual_seed(1)
    lists = torch.randperm(8 * max_context_len, generator=generator).view(8, -1).int()
    positions = [[start + j for j in range(num_steps + 1)] for start in starts]
    of_row = [lists[row].tolist() for row in rows]
    row_slots = [[of_row[i][p] for p in positions[i]] for i in range(batch_size)]
    slots = [[of_row[i][start + j] for j in range(2 * num_steps)] for i, start in enumerate(starts)]
    kv_lens = [start + num_steps + 1 for start in starts]
    block_table = [[of_row[i][p] for p in range(max_kv_len)] for i in range(batch_size)]
    expected = [torch.tensor(rows) for rows in (positions, row_slots, slots, kv_lens, block_table)]
    outputs = [unwritten(*tensor.shape) for tensor in expected]
    inputs = torch.tensor(starts), torch.tensor(rows), lists
    return Launch(
        (batch_size,),
        (*inputs, *outputs, max_context_len, max_kv_len),
        dict(enumerate(expected, start=len(inputs))),
        (
            ("arith.addi %1, %c4_i64", "arith.subi %1, %c4_i64"),  # kv_lens
            ("arith.addi %16, %7", "arith.subi %16, %7"),  # positions
            ("%arg15, %c6_i32", "%arg15, %c4_i32"),  # slots
            ("arith.addi %4, %1", "arith.addi %4, %4"),  # row_slots
            ("%c1024 = arith.constant 1024", "%c1024 = arith.constant 1023"),  # block_table
        ),
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


def place_tail() -> Launch:
    num_tails, accept_lens, new_seq_lens = 2, [1, 4, 3], [5, 17, 1029]
    slots = torch.randperm(100, generator=torch.Generator().manual_seed(3))[:18].view(3, 6)
    columns = list(zip(new_seq_lens, accept_lens, slots.tolist(), strict=True))
    positions = [[start + j for start, _, _ in columns] for j in range(num_tails)]
    places = [[row[accepted + j] for _, accepted, row in columns] for j in range(num_tails)]
    kv_lens = [[start + j + 1 for start, _, _ in columns] for j in range(num_tails)]
    expected = [torch.tensor(rows) for rows in (positions, places, kv_lens)]
    inputs = torch.tensor(new_seq_lens), torch.tensor(accept_lens, dtype=torch.int32), slots
    return Launch(
        (len(columns),),
        (*inputs, *(unwritten(num_tails, len(columns)) for _ in expected), len(columns), 6),
        dict(enumerate(expected, start=len(inputs))),
        (("arith.addi", "arith.subi"), ("arith.muli", "arith.addi")),
    )


LAUNCHES = {
    "prepare_step K=3": prepare_step,
    "verify_chain K=3": verify_chain,
    "place_tail K=3": place_tail,
}
