"""Launches of the sampling kernels; the oracles are float64 on whole rows."""

from __future__ import annotations

import torch
from launches import Launch

UNWRITTEN = -7.0
# Two tiles and a part of a group, so that rows end inside of each.
NUM_ROWS, VOCAB_SIZE, GROUP, TILE, CAPACITY = 3, 2 * 4096 + 100, 64, 64, 128


def logits(vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return 4 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator)[:, :vocab_size].contiguous()


def group_maxima(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.amax(1) for part in x.split(GROUP, dim=1)], dim=1)


def stream(vocab_size: int = VOCAB_SIZE) -> Launch:
    x = logits(vocab_size)
    group_max = group_maxima(x)
    tiles = x.double().split(GROUP * TILE, dim=1)
    tile_max = torch.stack([tile.amax(1) for tile in tiles], dim=1)
    tile_mass = torch.stack([(t - t.amax(1, keepdim=True)).exp().sum(1) for t in tiles], dim=1)
    outputs = [torch.full(t.shape, UNWRITTEN) for t in (group_max, tile_max, tile_mass)]
    changes = (("arith.subf", "arith.addf"), ("arith.maxnumf %in", "arith.minnumf %in"))
    return Launch(
        (NUM_ROWS, 2),
        (x, *outputs, vocab_size, vocab_size, group_max.shape[1], len(tiles), 2),
        {1: group_max, 2: tile_max, 3: tile_mass},
        changes,
        4096 * 2**-24 * tile_mass.max().item(),
    )


def weigh(vocab_size: int = VOCAB_SIZE) -> Launch:
    """Coarse logits, so that each row's threshold lies among equal ones: top-k cuts the many of the
    first row within a block, and the few of the second; top-p those of the third."""
    x = (logits(vocab_size) * 2).round() / 2
    x[0, :5000] = 3.5
    top_ks = torch.tensor([4200, 300, 1 << 30], dtype=torch.int32)
    top_ps, min_ps = torch.tensor([1.0, 1.0, 0.7]), torch.tensor([0.0, 0.001, 0.0])
    weights = (x.double() - x.amax(1, keepdim=True)).exp()
    masses = weights.sum(1, keepdim=True)
    ordered, tokens = weights.sort(dim=1, descending=True, stable=True)
    kept = torch.arange(vocab_size) < top_ks[:, None]
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
        (x, *rows, torch.full(x.shape, UNWRITTEN), vocab_size, vocab_size),
        {7: probs},
        changes,
        1e-5,
    )


def key_of(x: torch.Tensor) -> torch.Tensor:
    """int32 that are ordered as the floats are."""
    bits = x.view(torch.int32)
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def refine(vocab_size: int = 65 * GROUP) -> Launch:
    """Rows whose candidate groups are too many, so that they are bisected, one by its mass and one
    by the number of its tokens; one group more than a tile. Among coarse logits no count is met."""
    x = (2 * logits(vocab_size)[:2]).round() / 2
    group_max = group_maxima(x)
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
        (x, group_max, *rows, *outputs, vocab_size, vocab_size, group_max.shape[1]),
        {9: thresholds, 10: masses},
        (("arith.cmpf ogt", "arith.cmpf olt"), ("arith.cmpf olt", "arith.cmpf ogt")),
        vocab_size * 2**-24 * masses.max().item(),
    )


def refine_candidates(vocab_size: int) -> Launch:
    """Rows no longer than their candidates, one by top-p, one by top-k and one by both. Several
    logits equal the one that top-k ends at, so that no count is met. What lies behind the
    candidates of a row was never written."""
    x = (2 * logits(vocab_size)).round() / 2
    group_max, largest = group_maxima(x), x.amax(1, keepdim=True)
    num_groups = group_max.shape[1]
    top_ks = (x > x.mode(dim=1, keepdim=True).values).sum(1) + 1
    top_ks[0] = 1 << 30
    top_ps = torch.tensor([0.95, 1.0, 0.6])
    weights = (x.double() - largest).exp()
    row_masses = weights.sum(1, keepdim=True)
    ordered = x.sort(dim=1, descending=True).values
    crossing = ((ordered.double() - largest).exp().cumsum(1) < top_ps[:, None] * row_masses).sum(1)
    last = torch.minimum(top_ks.clamp(max=vocab_size) - 1, crossing.clamp(max=vocab_size - 1))
    thresholds = ordered.gather(1, last[:, None])
    masses = torch.where(x >= thresholds, weights, 0.0).sum(1)
    of_groups = group_max.sort(dim=1, descending=True).values
    cuts = of_groups.gather(1, top_ks.clamp(max=num_groups)[:, None] - 1)
    cuts[top_ks > num_groups] = torch.finfo(torch.float32).min
    candidates = torch.full((NUM_ROWS, CAPACITY), 1 << 28, dtype=torch.int32)
    for row, reach in enumerate(group_max >= cuts):
        candidates[row, : int(reach.sum())] = reach.nonzero()[:, 0]
    counts = (group_max >= cuts).sum(1).int()
    rows = top_ks.int(), top_ps, largest[:, 0], row_masses[:, 0].float(), key_of(cuts[:, 0]), counts
    outputs = torch.full((NUM_ROWS,), UNWRITTEN), torch.full((NUM_ROWS,), UNWRITTEN)
    return Launch(
        (NUM_ROWS,),
        (x, group_max, *rows, candidates, *outputs, vocab_size, vocab_size, num_groups),
        {9: thresholds[:, 0], 10: masses},
        (),
        vocab_size * 2**-24 * masses.max().item(),
    )


LAUNCHES = {"stream fp32": stream, "refine fp32": refine, "weigh fp32": weigh}
