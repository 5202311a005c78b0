"""Launches of the attention kernels; the oracle takes one row at a time, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from launches import Launch

UNWRITTEN = -7.0
PAGE_SIZE = BLOCK_N = 128
QUERY_LEN, NUM_SPLITS = 4, 2
# Two pages and a part of a third; fewer keys than queries; a request whose last split is empty.
KV_LENS = [300, 3, 100]
PAGES = [[5, 0, 3], [2, 0, 0], [4, 0, 0]]
NUM_PAGES = 6
# A weight is rounded to bf16, by 2^-9 at most; values reach 5 and their weights sum to 1.
TOLERANCE = 5 * 2**-9 + 1e-5


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).clamp(-5, 5).to(dtype)


def slot_of(request: int, key: int) -> int:
    return PAGES[request][key // PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE


def visible_of_split(
    request: int, query: int, split: int, num_splits: int, query_len: int = QUERY_LEN
) -> list[int]:
    """The keys that a query row sees in a split: whole tiles each, up to the row itself."""
    kv_len = KV_LENS[request]
    num_tiles = -(-kv_len // BLOCK_N)
    per_split = -(-num_tiles // num_splits) * BLOCK_N
    last = kv_len - query_len + query
    return [key for key in range(split * per_split, (split + 1) * per_split) if key <= last]


def has_no_tile(request: int, num_splits: int) -> list[int]:
    """The splits past the end of a request."""
    num_tiles = -(-KV_LENS[request] // BLOCK_N)
    return [
        split for split in range(num_splits) if split * -(-num_tiles // num_splits) >= num_tiles
    ]


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float):
    """float64 (output [width], log of the mass) of one row over [n, ...] keys and values."""
    scores = keys.double() @ query.double() * scale
    return scores.softmax(0) @ values.double(), scores.logsumexp(0).item()


def rows(query_len: int = QUERY_LEN) -> Iterator[tuple[int, int]]:
    """(request, query) of every query row, in order."""
    for request in range(len(KV_LENS)):
        for query in range(query_len):
            yield request, query


def latent(
    num_splits: int, blocks: int = 4, num_heads: int = 16, in_memory: bool = False
) -> Launch:
    """``blocks`` programs share the rows of a request."""
    rank, rope = 512, 64
    scale = (128 + rope) ** -0.5
    query = random(len(KV_LENS) * QUERY_LEN, num_heads, rank + rope, seed=1)
    cache = random(NUM_PAGES * PAGE_SIZE, rank + rope, seed=2)
    shape = (len(KV_LENS) * QUERY_LEN, num_heads, num_splits)
    output = torch.zeros(*shape, rank, dtype=torch.float64)
    masses = torch.full(shape, -torch.inf, dtype=torch.float64)
    for row, (request, position) in enumerate(rows()):
        for split in range(num_splits):
            visible = visible_of_split(request, position, split, num_splits)
            keys = [slot_of(request, key) for key in visible]
            for head in range(num_heads if keys else 0):
                found = cache[keys]
                attended = attend(query[row, head], found, found[:, :rank], scale)
                output[row, head, split], masses[row, head, split] = attended
    if in_memory:  # nobody reads or writes the output of a split without a tile
        for row, (request, _) in enumerate(rows()):
            output[row, :, has_no_tile(request, num_splits)] = UNWRITTEN
    is_partial = num_splits > 1 or in_memory
    dtype = torch.float32 if is_partial else torch.bfloat16
    expected = {6: output, 7: masses} if is_partial else {6: output}
    initial = torch.full(output.shape, UNWRITTEN, dtype=dtype), torch.zeros(shape)
    queries = query[..., :rank].contiguous(), query[..., rank:].contiguous()
    caches = cache[:, :rank].contiguous(), cache[:, rank:].contiguous()
    operands = *queries, *caches, torch.tensor(PAGES), torch.tensor(KV_LENS)
    return Launch(
        (blocks, num_splits, len(KV_LENS)),
        (*operands, *initial, scale, *2 * (rank, rope), len(PAGES[0]), num_splits),
        expected,
        CHANGES_IN_MEMORY if in_memory else CHANGES,
        TOLERANCE + (0 if is_partial else 2**-8 * 5),  # and once more for the output
    )


def gqa_split(query_len: int) -> Launch:
    num_kv_heads, group, dim = 8, 4, 128
    scale = dim**-0.5
    query = random(len(KV_LENS) * query_len, num_kv_heads * group, dim, seed=3)
    keys, values = (random(NUM_PAGES * PAGE_SIZE, num_kv_heads, dim, seed=seed) for seed in (4, 5))
    shape = (len(KV_LENS), num_kv_heads, query_len, group, NUM_SPLITS)
    output = torch.zeros(*shape, dim, dtype=torch.float64)
    masses = torch.full(shape, -torch.inf, dtype=torch.float64)
    for row, (request, position) in enumerate(rows(query_len)):
        for split in range(NUM_SPLITS):
            visible = visible_of_split(request, position, split, NUM_SPLITS, query_len)
            slots = [slot_of(request, key) for key in visible]
            for head in range(num_kv_heads * group if slots else 0):
                of_head = head // group
                attended = attend(
                    query[row, head], keys[slots, of_head], values[slots, of_head], scale
                )
                place = request, of_head, position, head % group, split
                output[place], masses[place] = attended
    initial = torch.full(output.shape, UNWRITTEN), torch.zeros(shape)
    operands = query, keys, values, torch.tensor(PAGES), torch.tensor(KV_LENS)
    strides = num_kv_heads * dim, num_kv_heads * dim, len(PAGES[0])
    return Launch(
        (1, NUM_SPLITS, len(KV_LENS) * num_kv_heads),
        (*operands, *initial, scale, *strides, NUM_SPLITS),
        {5: output, 6: masses},
        CHANGES,
        TOLERANCE,
    )


CHANGES = (
    ("arith.cmpi slt, %broadcasted", "arith.cmpi sle, %broadcasted"),  # the causal mask
    ("arith.addf %in", "arith.maxnumf %in"),  # the sum of a row's weights
    ("arith.divf", "arith.mulf"),
    ("arith.divsi %arg", "arith.addi %arg"),  # the page of a tile
)
# There is no division: what is kept is the output so far.
CHANGES_IN_MEMORY = (
    *(change for change in CHANGES if change[0] != "arith.divf"),
    ("math.log", "math.sqrt"),  # the mass
)


def merge_splits() -> Launch:
    num_kv_heads, group, width = 8, 4, 128
    shape = (len(KV_LENS), num_kv_heads, QUERY_LEN, group, NUM_SPLITS)
    outputs = random(*shape, width, seed=6, dtype=torch.float32)
    masses = random(*shape, seed=7, dtype=torch.float32)
    masses[0, :, :, 0, 1] = -torch.inf  # a split without keys, whose output nobody wrote
    outputs[0, :, :, 0, 1] = torch.nan
    masses[1, 0, 0, 0] = -torch.inf  # a row without keys
    weights = masses.double().softmax(-1).nan_to_num(0.0)
    seen = torch.where(masses[..., None] > -torch.inf, outputs.double(), 0.0)
    merged = (weights[..., None] * seen).sum(-2).transpose(1, 2)  # by query, then key head
    output = torch.full(merged.shape, UNWRITTEN, dtype=torch.bfloat16)
    changes = (("arith.mulf", "arith.addf"), ("arith.divf", "arith.mulf"))
    grid = (masses.numel() // NUM_SPLITS, 1)
    return Launch(grid, (outputs, masses, output, NUM_SPLITS), {2: merged}, changes, 5 * 2**-8)


LAUNCHES = {
    "mla_split bf16 H=16 rows=64 split": partial(latent, NUM_SPLITS),
    "mla_in_parts bf16 H=16 rows=64 split": partial(latent, NUM_SPLITS, 1),
    "mla_in_parts bf16 H=16 rows=64": partial(latent, 1, 1),
    "mla_in_memory bf16 H=32 rows=128 split": partial(latent, NUM_SPLITS, 1, 32, True),
    "gqa_split bf16 H=32/8 D=128 split": partial(gqa_split, QUERY_LEN),
    "gqa_split bf16 H=32/8 D=128 decode": partial(gqa_split, 1),
    "merge_splits": merge_splits,
}
