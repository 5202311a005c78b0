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


def key_of(x: torch.Tensor) -> torch.Tensor:
    """int32 that are ordered as the floats are."""
    bits = x.view(torch.int32)
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def refine() -> Launch:
    """Rows whose candidate groups are too many, so that they are bisected, one by its mass and one
    by the number of its tokens; one group more than a tile. Among coarse logits no count is met."""
    x = (2 * logits()[:2, : 65 * GROUP]).round() / 2
    group_max = torch.stack([part.amax(1) for part in x.split(GROUP, dim=1)], dim=1)
    top_ks, top_ps = torch.tensor([1 << 30, 1001], dtype=torch.int32), torch.tensor([0.95, 1.0])
    largest = x.amax(1)
    weights = (x.double() - largest[:, None]).exp()
    row_masses = weights.sum(1)
    ordered = x.sort(dim=1, descending=True).values
    shares = (ordered.double() - largest[:, None]).exp().cumsum(1)
    by_mass = ordered[0, int((shares[0] < 0.95 * row_masses[0]).sum())]
    thresholds = torch.stack([by_mass, ordered[1, 1000]])
    masses = torch.where(x >= thresholds[:, None], weights, 0.0).sum(1)
    cuts = torch.stack([key_of(largest)[0] + 1, key_of(x[1].amin()[None])[0]])
    counts, candidates = torch.full((2,), 200, dtype=torch.int32), torch.zeros(2, 128).int()
    rows = top_ks, top_ps, largest, row_masses.float(), cuts, counts, candidates
    outputs = torch.full((2,), UNWRITTEN), torch.full((2,), UNWRITTEN)
    return Launch(
        (2,),
        (x, group_max, *rows, *outputs, x.shape[1], x.shape[1], 65),
        {9: thresholds, 10: masses},
        (("arith.cmpf ogt", "arith.cmpf olt"), ("arith.cmpf olt", "arith.cmpf ogt")),
        x.shape[1] * 2**-24 * masses.max().item(),
    )


LAUNCHES = {"stream fp32": stream, "refine fp32": refine, "weigh fp32": weigh}
