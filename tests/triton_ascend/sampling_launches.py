"""Launches of the sampling kernels; the oracles are float64 on whole rows."""

from __future__ import annotations

import torch
from launches import Launch

UNWRITTEN = -7.0
# Two tiles and a part of a group, so that rows end inside of each.
NUM_ROWS, VOCAB_SIZE, GROUP, TILE = 3, 2 * 4096 + 100, 64, 64
NUM_GROUPS, NUM_TILES = -(-VOCAB_SIZE // GROUP), 3


def logits() -> torch.Tensor:
    return 4 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


def stream() -> Launch:
    x = logits()
    group_max = torch.stack([part.amax(1) for part in x.split(GROUP, dim=1)], dim=1)
    tiles = x.double().split(GROUP * TILE, dim=1)
    tile_max = torch.stack([tile.amax(1) for tile in tiles], dim=1)
    tile_mass = torch.stack([(t - t.amax(1, keepdim=True)).exp().sum(1) for t in tiles], dim=1)
    outputs = [torch.full(t.shape, UNWRITTEN) for t in (group_max, tile_max, tile_mass)]
    changes = (("arith.subf", "arith.addf"), ("arith.maxnumf %in", "arith.minnumf %in"))
    return Launch(
        (NUM_ROWS, 2),
        (x, *outputs, VOCAB_SIZE, VOCAB_SIZE, NUM_GROUPS, NUM_TILES, 2),
        {1: group_max, 2: tile_max, 3: tile_mass},
        changes,
        4096 * 2**-24 * tile_mass.max().item(),
    )


LAUNCHES = {"stream fp32": stream}
