"""Loops of top-k, top-p and the joint filters that Numba compiles; arrays are NumPy's.

A logit is compared by its key: its float32 bits as an int32 that orders as the values do.
"""

from __future__ import annotations

import numpy as np

from sglang_ascend.ops.numba_cache import njit

INFINITY_KEY = 0x7F800000  # NaNs lie beyond it, and those with a sign beyond its negative
LOWEST = np.finfo(np.float32).min
NUM_BUCKETS = 2048
EXP_BLOCK = 64


@njit(inline="always")
def key_of(bits):
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


@njit
def group_maxima(bits, group_size, maxima):
    """maxima: int32 [groups], bits of each group's largest; returns the row's extreme keys."""
    lowest, highest = np.int32(0x7FFFFFFF), np.int32(-0x7FFFFFFF)
    for group in range(len(maxima)):
        start = group * group_size
        best = np.int32(-0x7FFFFFFF)
        for i in range(start, min(len(bits), start + group_size)):
            key = np.int32(key_of(bits[i]))
            best, lowest = max(best, key), min(lowest, key)
        highest = max(highest, best)
        maxima[group] = best if best >= 0 else -best | np.int32(-0x80000000)
    return lowest, highest


@njit
def collect(row, group_max, group_size, cut, values, tokens):
    """Copies the logits >= cut to the front of ``values`` and says which they are; reads only
    groups that have one."""
    count = 0
    for group in range(len(group_max)):
        if group_max[group] >= cut:
            start = group * group_size
            for i in range(start, min(len(row), start + group_size)):
                if row[i] >= cut:
                    values[count], tokens[count] = row[i], i
                    count += 1
    return count


@njit(fastmath={"contract"}, error_model="numpy")
def exponentials(values, largest, weights):
    """weights[i] = exp(values[i] - largest), whole blocks; 1 unit in the last place, e^-87 or more.

    2^n times a polynomial in what n log 2 leaves of the exponent (Cephes' expf).
    """
    exponents = np.empty(EXP_BLOCK, np.int32)
    powers = exponents.view(np.float32)
    for start in range(0, len(values), EXP_BLOCK):
        for j in range(EXP_BLOCK):
            x = max(values[start + j] - largest, np.float32(-87.0))
            n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
            r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
            y = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
            y = y * r + np.float32(8.3334519073e-3)
            y = y * r + np.float32(4.1665795894e-2)
            y = y * r + np.float32(1.6666665459e-1)
            y = y * r + np.float32(5.0000001201e-1)
            weights[start + j] = y * r * r + r + np.float32(1.0)
            exponents[j] = (np.int32(n) + np.int32(127)) << np.int32(23)
        for j in range(EXP_BLOCK):
            weights[start + j] *= powers[j]


@njit(fastmath={"reassoc"})
def total(weights):
    mass = 0.0
    for weight in weights:
        mass += weight
    return mass


@njit
def mass_of(logits, largest, values, weights):
    """The sum of exp(logit - largest); leaves both in values and weights, in whole blocks."""
    count = len(logits)
    blocks = -(-count // EXP_BLOCK) * EXP_BLOCK
    values[:count] = logits
    values[count:blocks] = largest
    exponentials(values[:blocks], largest, weights[:blocks])
    return total(weights[:count])


@njit
def crossing(values, weights, wanted):
    """The largest t for which the weights of values >= t sum to ``wanted``, and that sum.

    Overwrites values and weights.
    Finds the digits of t one after another: each value whose earlier digits are t's adds its weight
    to the bucket of its next digit.
    """
    buckets = np.empty(NUM_BUCKETS)
    bits = values.view(np.int32)
    count, above, chosen = len(values), 0.0, 0
    for shift in (21, 10, 0):
        buckets[:] = 0.0
        for i in range(count):
            digit = (np.int64(key_of(bits[i])) + 0x80000000) >> shift & (NUM_BUCKETS - 1)
            buckets[digit] += weights[i]
        for digit in range(NUM_BUCKETS - 1, -1, -1):
            if buckets[digit] > 0.0:
                chosen = digit
                if above + buckets[digit] >= wanted:
                    break
                above += buckets[digit]
        else:  # only by rounding: the lowest bucket it is
            above -= buckets[chosen]
        kept = 0
        for i in range(count):
            digit = (np.int64(key_of(bits[i])) + 0x80000000) >> shift & (NUM_BUCKETS - 1)
            if digit == chosen:
                values[kept], weights[kept] = values[i], weights[i]
                kept += 1
        count = kept
    return values[0], above + buckets[chosen]


@njit
def kth_largest(values, weights, k):
    """Overwrites values and weights."""
    weights[: len(values)] = 1.0
    return crossing(values, weights, k)[0]


@njit
def scratch_of(vocab_size):
    size = -(-vocab_size // EXP_BLOCK) * EXP_BLOCK
    return np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.int32)


@njit
def filter_row(row, top_k, top_p, joint, group_size, group_max, values, weights, tokens):
    """(threshold, largest, mass) of one row, NaN for threshold and mass if it is invalid.

    joint: whether top_p is a share of the whole row.
    values, weights, tokens: float32 and int32, scratch of whole blocks, at least a row.
    """
    lowest, highest = group_maxima(row.view(np.int32), group_size, group_max.view(np.int32))
    largest = group_max.max()
    if lowest < -INFINITY_KEY or highest >= INFINITY_KEY or largest < LOWEST:
        return np.nan, largest, np.nan
    num_groups, threshold, shared = len(group_max), LOWEST, 0.0
    if joint and top_p < 1 and top_k < len(row):
        shared = mass_of(row, largest, values, weights)
    if top_k <= num_groups:
        # That many groups have a logit from here on, so the k-th largest logit is no smaller.
        values[:num_groups] = group_max
        threshold = max(kth_largest(values[:num_groups], weights, top_k), LOWEST)
    count = collect(row, group_max, group_size, threshold, values, tokens)
    if top_k < count:
        threshold = kth_largest(values[:count], weights, top_k)
        count = collect(row, group_max, group_size, threshold, values, tokens)
    mass = mass_of(values[:count], largest, values, weights)
    wanted = max(top_p * max(mass, shared), np.finfo(np.float32).tiny)
    if top_p < 1 and wanted <= mass:
        threshold, mass = crossing(values[:count], weights[:count], wanted)
    return threshold, largest, mass


@njit(nogil=True)
def filter_rows(logits, top_ks, top_ps, joint, group_size, thresholds, maxima, masses, group_max):
    scratch = scratch_of(logits.shape[1])
    for i in range(len(logits)):
        thresholds[i], maxima[i], masses[i] = filter_row(
            logits[i], max(top_ks[i], 1), top_ps[i], joint, group_size, group_max[i], *scratch
        )


@njit
def weigh_row(row, cut, largest, top_k, top_p, min_p, group_size, group_max, scratch, probs):
    """probs: a row of zeros, in which the tokens that the joint filters keep get their shares.

    Of the tokens equal to the smallest one above the threshold as many stay as top_k has room for,
    and as have no more than top_p of the mass before them: at least one.
    cut: the threshold. scratch: values, weights and tokens as in ``filter_row``.
    """
    values, weights, tokens = scratch
    left = top_p * mass_of(row, largest, values, weights) if top_p < 1 else np.inf
    count = collect(row, group_max, group_size, cut, values, tokens)
    lowest = values[:count].min()
    mass_of(values[:count], largest, values, weights)
    room = top_k
    for i in range(count):
        if values[i] > lowest:
            room -= 1
            left -= weights[i]
    is_first, mass = True, 0.0
    for i in range(count):
        if values[i] == lowest:
            fits = is_first or (room > 0 and left >= 0)
            is_first, room, left = False, room - 1, left - weights[i]
            if not fits:
                weights[i] = 0
        if weights[i] < min_p:
            weights[i] = 0
        mass += weights[i]
    for i in range(count):
        probs[tokens[i]] = weights[i] / mass


@njit(nogil=True)
def weigh_rows(logits, thresholds, maxima, top_ks, top_ps, min_ps, group_size, group_max, probs):
    scratch = scratch_of(logits.shape[1])
    for i in range(len(logits)):
        threshold, largest = max(thresholds[i], LOWEST), maxima[i]
        filters, groups = (top_ks[i], top_ps[i], min_ps[i]), (group_size, group_max[i])
        weigh_row(logits[i], threshold, largest, *filters, *groups, scratch, probs[i])
