"""Top-k and top-p in Triton: the logits are read once, then only those groups of them whose maximum
says that they matter. Plain pointers and no sort, as triton-ascend takes them too."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton's annotations: a sum may be a tuple, and a literal is no constexpr.)

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
LOWEST_KEY = tl.constexpr(-0x7F7FFFFF)  # of LOWEST
# Several lie in one allocation: where they begin depends on the number of rows, and a kernel is
# compiled once, whether that is a multiple of 16 bytes or not.
UNALIGNED = ("tile_mass", "largest_logits", "masses", "row_masses", "cuts", "counts", "thresholds")


@triton.jit
def key_of(values):
    """Their bits as int32 that order as they do; -0 is 0."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


@triton.jit
def value_of(key):
    return tl.where(key >= 0, key, -key | -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def crossing(keys, weights, wanted, low, high):
    """A t in [low, high) that as many keys reach as reach the largest t of which the weights of
    keys >= t sum to ``wanted``; low if there is none."""
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        found = tl.sum(tl.where(keys >= middle, weights, 0.0))
        low = tl.where(found >= wanted, middle, low)
        high = tl.where(found == wanted, middle + 1, tl.where(found > wanted, high, middle))
    return low


@triton.jit(do_not_specialize=["tiles_per_part"], do_not_specialize_on_alignment=UNALIGNED)
def stream(
    logits,
    group_max,
    tile_max,
    tile_mass,
    stride,
    vocab_size,
    num_groups,
    num_tiles,
    tiles_per_part,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,  # groups
):
    """Stage A, the only read of every logit. One program per row and part of it: group maxima, and
    each tile's maximum and sum of exp(x - maximum), which is NaN after a NaN or +inf. Sums are per
    tile and not per part, so that they are the same whatever a row is batched with."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.minimum((part + 1) * tiles_per_part, num_tiles)
    for tile in range(part * tiles_per_part, end):
        groups = tile * TILE + tl.arange(0, TILE)
        tokens = tile * (TILE * GROUP) + tl.arange(0, TILE * GROUP)
        x = tl.load(logits + row * stride + tokens, mask=tokens < vocab_size, other=-float("inf"))
        x = tl.reshape(x.to(tl.float32), (TILE, GROUP))
        maxima = tl.max(x, axis=1)
        tl.store(group_max + row * num_groups + groups, maxima, mask=groups < num_groups)
        largest = tl.maximum(tl.max(maxima, axis=0), LOWEST)
        tl.store(tile_max + row * num_tiles + tile, largest)
        tl.store(tile_mass + row * num_tiles + tile, tl.sum(tl.exp(x - largest)))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def bound(
    group_max,
    tile_max,
    tile_mass,
    top_ks,
    largest_logits,
    masses,
    cuts,
    counts,
    candidates,
    vocab_size,
    num_groups,
    num_tiles,
    GROUPS: tl.constexpr,  # a power of two, at least num_groups
    TILES: tl.constexpr,  # the same of num_tiles
    CAPACITY: tl.constexpr,
):
    """Stage B, one program per row: where its threshold can lie at the lowest, and which groups
    reach up to there. Top-k: the k-th largest group maximum, for k groups have a logit from it on.
    Without top-k: as low as CAPACITY groups can show."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    maxima = tl.load(tile_max + row * num_tiles + tiles, mask=tiles < num_tiles, other=LOWEST)
    mass = tl.load(tile_mass + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    largest = tl.max(maxima, axis=0)
    tl.store(largest_logits + row, largest)
    tl.store(masses + row, tl.sum(mass * tl.exp(maxima - largest)))

    groups = tl.arange(0, GROUPS)
    inside = groups < num_groups
    reach = tl.load(group_max + row * num_groups + groups, mask=inside, other=-float("inf"))
    keys = key_of(reach)
    limited = tl.load(top_ks + row) < vocab_size
    # A half more than CAPACITY: no number of groups meets it, so the search ends at a group's key.
    wanted = tl.where(limited, tl.load(top_ks + row).to(tl.float32), CAPACITY + 0.5)
    above = key_of(largest) + 1
    low = tl.where(wanted <= num_groups, tl.min(tl.where(inside, keys, above)), LOWEST_KEY - 1)
    high = tl.where(wanted <= num_groups, above, LOWEST_KEY)
    cut = crossing(keys, 1.0, wanted, low, high)
    cut = tl.maximum(tl.where(limited, cut, cut + 1), LOWEST_KEY)
    chosen = keys >= cut
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(candidates + row * CAPACITY + place, groups, mask=chosen & (place < CAPACITY))
    tl.store(cuts + row, cut)
    tl.store(counts + row, tl.sum(chosen.to(tl.int32)))


@triton.jit
def sum_from(
    pivot,
    logits,
    group_max,
    largest,
    vocab_size,
    num_groups,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """(number, sum of exp(x - largest)) of a row's logits with keys >= pivot; reads the groups that
    have one."""
    number, mass = 0.0, 0.0
    for tile in range(0, (num_groups + TILE - 1) // TILE):
        # The last tile ends with the row: triton-ascend reads what a mask of values excludes.
        first = tl.minimum(tile * TILE, num_groups - TILE)
        groups = first + tl.arange(0, TILE)
        reach = tl.load(group_max + groups, mask=groups < num_groups, other=-float("inf"))
        tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        is_new = (key_of(reach) >= pivot) & (groups >= tile * TILE)
        wanted = is_new[:, None] & (tokens < vocab_size)
        x = tl.load(logits + tokens, mask=wanted, other=-float("inf")).to(tl.float32)
        found = wanted & (key_of(x) >= pivot)
        number += tl.sum(tl.where(found, 1.0, 0.0))
        mass += tl.sum(tl.where(found, tl.exp(x - largest), 0.0))
    return number, mass


@triton.jit
def bisect(
    BY_MASS: tl.constexpr,
    wanted,
    low,
    high,
    logits,
    group_max,
    largest,
    vocab_size,
    num_groups,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """``crossing`` over a whole row: at most 32 passes, each over the groups its pivot needs."""
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)
        number, mass = sum_from(
            middle, logits, group_max, largest, vocab_size, num_groups, GROUP, TILE
        )
        found = number
        if BY_MASS:
            found = mass
        low = tl.where(found >= wanted, middle, low)
        high = tl.where(found == wanted, middle + 1, tl.where(found > wanted, high, middle))
    return low


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def refine(
    logits,
    group_max,
    top_ks,
    top_ps,
    largest_logits,
    row_masses,
    cuts,
    counts,
    candidates,
    thresholds,
    masses,
    stride,
    vocab_size,
    num_groups,
    JOINT: tl.constexpr,  # top_p is a share of the row's mass, and not of what top-k left
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Stage C, one program per row: its threshold, and the mass from there on. From the candidate
    groups, loaded once, where they show it; by bisection if not."""
    # A row is bisected only if it has more groups than CAPACITY, and so no tile is longer than it.
    tl.static_assert(TILE <= CAPACITY, "a row may be bisected that is shorter than a tile")
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    largest, row_mass = tl.load(largest_logits + row), tl.load(row_masses + row)
    cut, count = tl.load(cuts + row), tl.load(counts + row)
    logits += row * stride
    group_max += row * num_groups
    limited = top_k < vocab_size
    threshold, above = LOWEST_KEY, key_of(largest) + 1
    mass = row_mass
    # A row without either filter keeps everything; one without a finite maximum nothing.
    open_question = (row_mass > 0.0) & (limited | (top_p < 1.0))

    if open_question & (count <= CAPACITY):
        places = tl.arange(0, CAPACITY)
        groups = tl.load(candidates + row * CAPACITY + places, mask=places < count, other=0)
        tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (places < count)[:, None] & (tokens < vocab_size)
        x = tl.load(logits + tokens, mask=inside, other=-float("inf")).to(tl.float32)
        keys = key_of(x)
        weights = tl.exp(x - largest)
        if limited:
            lowest = tl.min(tl.where(keys >= cut, keys, above))
            threshold = crossing(keys, 1.0, top_k.to(tl.float32), lowest, above)
            mass = tl.sum(tl.where(keys >= threshold, weights, 0.0))
            open_question = False
        else:
            threshold = cut
            found = tl.sum(tl.where(keys >= cut, weights, 0.0))
            open_question = (cut > LOWEST_KEY) & (found < top_p * row_mass)
        if (top_p < 1.0) & (open_question == 0):
            shared = row_mass if JOINT else mass
            threshold = crossing(keys, weights, top_p * shared, threshold, above)
            mass = tl.sum(tl.where(keys >= threshold, weights, 0.0))

    if open_question:
        if limited:
            threshold = bisect(
                False,
                top_k.to(tl.float32),
                cut,
                above,
                logits,
                group_max,
                largest,
                vocab_size,
                num_groups,
                GROUP,
                TILE,
            )
            _, mass = sum_from(
                threshold, logits, group_max, largest, vocab_size, num_groups, GROUP, TILE
            )
        else:
            threshold = LOWEST_KEY
            above = cut
        if top_p < 1.0:
            shared = row_mass if JOINT else mass
            threshold = bisect(
                True,
                top_p * shared,
                threshold,
                above,
                logits,
                group_max,
                largest,
                vocab_size,
                num_groups,
                GROUP,
                TILE,
            )
            _, mass = sum_from(
                threshold, logits, group_max, largest, vocab_size, num_groups, GROUP, TILE
            )

    valid = row_mass > 0.0
    tl.store(thresholds + row, tl.where(valid, value_of(threshold), float("nan")))
    tl.store(masses + row, tl.where(valid, mass, float("nan")))
