"""The seeded draw in Triton: MurmurHash3, exponential noise and the race, in 32 bits throughout."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton's annotations: a maximum may be a tuple.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(state, key):
    """A round of MurmurHash3; int32 wraps as uint32 would, whose shifts the masks make up for."""
    key *= -862048943  # 0xCC9E2D51
    key = ((key << 15) | ((key >> 17) & 0x7FFF)) * 0x1B873593
    state ^= key
    return ((state << 13) | ((state >> 19) & 0x1FFF)) * 5 - 430675100  # + 0xE6546B64


@triton.jit
def finish(state):
    state ^= 16
    state = (state ^ ((state >> 16) & 0xFFFF)) * -2048144789  # 0x85EBCA6B
    state = (state ^ ((state >> 13) & 0x7FFFF)) * -1028477387  # 0xC2B2AE35
    return state ^ ((state >> 16) & 0xFFFF)


@triton.jit
def fraction(bits):
    """bits / 2^32 of unsigned bits, rounded once."""
    high, low = (bits >> 8) & 0xFFFFFF, bits & 0xFF
    return (high.to(tl.float32) * 256.0 + low.to(tl.float32)) * 2.3283064365386963e-10


@triton.jit
def log_noise(hashed):
    """log(-log(u)) of u = hashed / (2^32 - 1), also where u is next to 1, by what it lacks: with
    y = 1 - u and s = y / (2 - y), -log(u) = 2 (s + s^3/3 + s^5/5 + ...)."""
    u = fraction(hashed)
    y = tl.maximum(fraction(-1 - hashed), 2.3283064365386963e-10)
    s = y / (2.0 - y)
    s2 = s * s
    series = 1.0 / 13.0 + s2 * (1.0 / 15.0)
    series = 1.0 / 9.0 + s2 * (1.0 / 11.0 + s2 * series)
    series = 1.0 / 5.0 + s2 * (1.0 / 7.0 + s2 * series)
    series = 2.0 * s * (1.0 + s2 * (1.0 / 3.0 + s2 * series))
    noise = tl.where(hashed < 0, series, -tl.log(tl.maximum(u, 2.3283064365386963e-10)))
    return tl.where(hashed == 0, 709.782712893384, tl.log(noise))


@triton.jit
def draw(
    logits,
    group_max,
    thresholds,
    largest_logits,
    seeds,
    positions,
    part_scores,
    part_tokens,
    stride,
    vocab_size,
    num_groups,
    tiles_per_part,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Stage D: the winner of each part of a row, among the groups that reach the threshold."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    threshold, largest = tl.load(thresholds + row), tl.load(largest_logits + row)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    best_score = -float("inf")
    best_token = 0
    for tile in range(part * tiles_per_part, (part + 1) * tiles_per_part):
        groups = tile * TILE + tl.arange(0, TILE)
        places = row * num_groups + groups
        reach = tl.load(group_max + places, mask=groups < num_groups, other=-float("inf"))
        needed = reach >= threshold
        if tl.max(needed.to(tl.int32), axis=0) > 0:
            tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            inside = needed[:, None] & (tokens < vocab_size)
            x = tl.load(logits + row * stride + tokens, mask=inside, other=-float("inf"))
            x = x.to(tl.float32)
            state = mix(tokens * 0, seed.to(tl.int32))
            state = mix(mix(state, (seed >> 32).to(tl.int32)), position.to(tl.int32))
            scores = x - largest - log_noise(finish(mix(state, tokens)))
            scores = tl.where(x >= threshold, scores, -float("inf"))
            score = tl.max(scores)
            token = tl.min(tl.where(scores == score, tokens, 0x7FFFFFFF))
            better = score > best_score
            best_token = tl.where(better, token, best_token)
            best_score = tl.where(better, score, best_score)
    place = row * tl.num_programs(1) + part
    tl.store(part_scores + place, best_score)
    tl.store(part_tokens + place, best_token)
