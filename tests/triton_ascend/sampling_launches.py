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


def weigh() -> Launch:
    """Coarse logits, so that each row's threshold lies among equal ones: top-k cuts the many of the
    first row within a block, and the few of the second; top-p those of the third."""
    x = (logits() * 2).round() / 2
    x[0, :5000] = 3.5
    top_ks = torch.tensor([4200, 300, 1 << 30], dtype=torch.int32)
    top_ps, min_ps = torch.tensor([1.0, 1.0, 0.7]), torch.tensor([0.0, 0.001, 0.0])
    weights = (x.double() - x.amax(1, keepdim=True)).exp()
    masses = weights.sum(1, keepdim=True)
    ordered, tokens = weights.sort(dim=1, descending=True, stable=True)
    kept = torch.arange(VOCAB_SIZE) < top_ks[:, None]
    kept &= ordered.cumsum(1) - ordered <= top_ps[:, None] * masses
    kept &= ordered >= min_ps[:, None]
    shares = torch.where(kept, ordered, 0.0)
    shares /= shares.sum(1, keepdim=True)
    probs = torch.zeros_like(shares).scatter(1, tokens, shares)
    thresholds = torch.where(probs > 0, x, torch.inf).amin(1)
    rows = thresholds, x.amax(1), masses[:, 0].float(), top_ks, top_ps, min_ps
    changes = (("arith.cmpf oge", "arith.cmpf ogt"), ("arith.subf", "arith.addf"))
    return Launch(
        (NUM_ROWS,),
        (x, *rows, torch.full(x.shape, UNWRITTEN), VOCAB_SIZE, VOCAB_SIZE),
        {7: probs},
        changes,
        1e-5,
    )


LAUNCHES = {"stream fp32": stream, "weigh fp32": weigh}
