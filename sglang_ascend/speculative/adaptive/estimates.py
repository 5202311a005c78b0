"""What a server learns: how often each draft is kept, and what a step of K drafts costs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from sglang_ascend.speculative.adaptive.value import expected_tokens

# Of a_1 before anything was drafted, and the drafts that it counts for. a_j+1 starts from a_j.
PRIOR_ACCEPTANCE, PRIOR_DRAFTS = 0.7, 8.0
# Judged drafts after which an older one counts half: replies differ, and change as they go on.
HALF_LIFE_DRAFTS = 500.0

# A cost is the mean of the last samples but for pauses of the machine, which any K meets: those
# above so many times the lower quartile. The quartile itself flatters a K whose steps vary more.
WINDOW, MIN_SAMPLES, PAUSE = 15, 3, 1.5
# Costs are kept apart for batches, and for contexts, that differ by more than these factors.
BATCH_RATIO, CONTEXT_RATIO = 1.3, 4.0
# What a guess is reduced by for each doubling between its batch and a measured one, and at most:
# what may be good is tried, and measured.
OPTIMISM, MOST_OPTIMISM = 0.97, 0.88
# Doublings beyond which a guess is no knowledge.
FAR = 1.5
# A cost that falls to this share of itself says that the machine was disturbed before.
DISTURBED = 0.5
# A step's cost before any was measured, in units of one at batch 1: constant, per request, per
# draft, per drafted row, per verified draft that the MTP layer does not draft, per row of those,
# per cached token of the batch.
PRIOR_COST = np.array([0.8, 0.02, 0.1, 0.01, 0.02, 0.006, 1e-6])
PRIOR_WEIGHT = 0.01

# The linear model is fitted anew where a guess is asked for after so many records, and after the
# first ones of a batch: a fit takes longer than all else that a step asks.
RECORDS_PER_FIT = 16

Bucket = tuple[int, int, int, int]  # batch, context, drafts, those that are verified
Features = tuple[float, ...]  # what PRIOR_COST is of


class Acceptance:
    """a_1, ..., a_K: kept drafts of those whose predecessors were kept, old ones fading."""

    def __init__(self, max_drafts: int) -> None:
        self._kept, self._judged = [0.0] * max_drafts, [0.0] * max_drafts

    def record(self, accepted: Sequence[int], num_drafts: int) -> None:
        """One step: the drafts kept of each request, of ``num_drafts``."""
        for j in range(num_drafts):
            judged = sum(n >= j for n in accepted)
            faded = 0.5 ** (judged / HALF_LIFE_DRAFTS)
            self._judged[j] = faded * self._judged[j] + judged
            self._kept[j] = faded * self._kept[j] + sum(n > j for n in accepted)

    def rates(self) -> list[float]:
        rates, before = [], PRIOR_ACCEPTANCE
        for kept, judged in zip(self._kept, self._judged, strict=True):
            before = (kept + PRIOR_DRAFTS * before) / (judged + PRIOR_DRAFTS)
            rates.append(before)
        return rates


class AcceptanceByClass:
    """``Acceptance`` of each class of requests: of greedy and of sampled ones.

    What a batch accepts changes at once when its requests do, and a class that has left the batch
    comes back with the acceptance that it had.
    """

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._of: dict[bool, Acceptance] = {}

    def of(self, is_sampled: bool) -> Acceptance:
        return self._of.setdefault(is_sampled, Acceptance(self._max_drafts))

    def record(self, accepted: Sequence[int], num_drafts: int, is_sampled: Sequence[bool]) -> None:
        """One step: the drafts kept of each request, of ``num_drafts``."""
        for wanted in set(is_sampled):
            mine = [n for n, given in zip(accepted, is_sampled, strict=True) if given == wanted]
            self.of(wanted).record(mine, num_drafts)

    def expected_tokens(self, share_sampled: float) -> list[float]:
        """E(0), E(1), ... of a batch of which a share is sampled."""
        shares = {False: 1 - share_sampled, True: share_sampled}
        rates = [(share, self.of(given).rates()) for given, share in shares.items() if share]
        return [
            sum(share * expected_tokens(of_class, k) for share, of_class in rates)
            for k in range(self._max_drafts + 1)
        ]


class Costs:
    """Seconds of a step of a batch that drafts K tokens, K in 0..max_drafts, and verifies as many,
    or more where some were looked up.

    Where it was measured, the mean. Elsewhere that of the nearest measured batch with the same K,
    carried over by a linear model that is fitted to all means. More drafts never cost less.

    A K that is not in force is measured in a few steps, and if the machine had other work just then
    nothing would correct it. So all others are forgotten where a cost falls to half of itself.
    """

    def __init__(self) -> None:
        self._samples: dict[Bucket, deque[float]] = {}
        self._measured: dict[Bucket, float] = {}
        self._features: dict[Bucket, Features] = {}
        self._of_load: dict[tuple[int, int], set[Bucket]] = {}  # the measured ones
        self._known: set[Bucket] = set()
        self._fitted = PRIOR_COST
        self._num_records, self._is_outdated = 0, False

    def record(
        self,
        batch_size: int,
        context: float,
        num_drafts: int,
        seconds: float,
        verified: int | None = None,
    ) -> None:
        bucket = _bucket(batch_size, context, num_drafts, verified)
        samples = self._samples.setdefault(bucket, deque(maxlen=WINDOW))
        samples.append(seconds)
        if len(samples) >= MIN_SAMPLES:
            cost = _mean_without_pauses(samples)
            if cost < DISTURBED * self._measured.get(bucket, 0.0):
                self._forget_all_but(bucket, list(samples)[-MIN_SAMPLES:])
            self._measured[bucket] = cost
            self._of_load.setdefault(bucket[:2], set()).add(bucket)
            self._features[bucket] = _features(batch_size, context, num_drafts, verified)
            self._num_records += 1
            if len(samples) == MIN_SAMPLES or self._num_records % RECORDS_PER_FIT == 0:
                self._is_outdated = True

    def _forget_all_but(self, bucket: Bucket, samples: list[float]) -> None:
        for held in (self._samples, self._measured, self._features, self._of_load, self._known):
            held.clear()
        self._samples[bucket] = deque(samples, maxlen=WINDOW)

    def is_known(self, batch_size: int, context: float, num_drafts: int) -> bool:
        """Whether it was measured here or not far from here."""
        bucket = _bucket(batch_size, context, num_drafts)
        if bucket not in self._known:
            nearest = self._nearest(bucket)
            if nearest is not None and _distance(bucket, nearest) <= FAR:
                self._known.add(bucket)
        return bucket in self._known

    def seconds(
        self, batch_size: int, context: float, num_drafts: int, verified: int | None = None
    ) -> float:
        bucket = _bucket(batch_size, context, num_drafts, verified)
        if bucket in self._measured:
            return min(
                self._measured[other]
                for other in self._of_load[bucket[:2]]
                if other[2] >= bucket[2] and other[3] >= bucket[3]
            )
        guess = self._modelled(_features(batch_size, context, num_drafts, verified))
        nearest = self._nearest(bucket)
        if nearest is None:
            return self._least(bucket, guess * MOST_OPTIMISM)
        carried = guess * self._measured[nearest] / self._modelled(self._features[nearest])
        return carried * max(MOST_OPTIMISM, OPTIMISM ** _distance(bucket, nearest))

    def _least(self, bucket: Bucket, guess: float) -> float:
        """Of drafts that were never measured where others were looked up: as little as it can be,
        so that they are tried. Where none was, probes try them, and it is the guess."""
        drafted, verified = bucket[2:]
        here = {other[2:]: self._measured[other] for other in self._of_load.get(bucket[:2], ())}
        if all(of_mtp == in_all for of_mtp, in_all in [*here, bucket[2:]]):
            return guess
        least = 0.0
        for (of_mtp, in_all), cost in here.items():
            if of_mtp <= drafted and in_all <= verified:
                least = max(least, cost)
            elif of_mtp == drafted and in_all > verified:
                least = max(least, cost * (verified + 1) / (in_all + 1))
        return least or guess

    def _nearest(self, bucket: Bucket) -> Bucket | None:
        """The nearest measured one of the same drafts."""
        if bucket in self._measured:
            return bucket
        same = (other for other in self._measured if other[2:] == bucket[2:])
        return min(same, key=lambda other: _distance(bucket, other), default=None)

    def _modelled(self, features: Features) -> float:
        if self._is_outdated:
            self._fit()
            self._is_outdated = False
        return float(np.dot(features, self._fitted))

    def _fit(self) -> None:
        """Least squares of relative errors, drawn towards the prior at the measured level."""
        seconds = np.array(list(self._measured.values()))
        rows = np.array([self._features[bucket] for bucket in self._measured])
        prior = PRIOR_COST * float(np.median(seconds / (rows @ PRIOR_COST)))
        relative = rows / seconds[:, None] * prior
        gram = relative.T @ relative + PRIOR_WEIGHT * np.eye(len(prior))
        fitted = np.linalg.solve(gram, relative.sum(0) + PRIOR_WEIGHT)
        self._fitted = prior * np.maximum(fitted, 1e-3)


def _mean_without_pauses(samples: Iterable[float]) -> float:
    ordered = sorted(samples)
    longest = PAUSE * ordered[len(ordered) // 4]
    steps = [seconds for seconds in ordered if seconds <= longest]
    return sum(steps) / len(steps)


def _bucket(
    batch_size: int, context: float, num_drafts: int, verified: int | None = None
) -> Bucket:
    batch = round(math.log(batch_size, BATCH_RATIO))
    length = round(math.log(max(context, 64.0), CONTEXT_RATIO))
    return batch, length, num_drafts, num_drafts if verified is None else verified


def _distance(one: Bucket, other: Bucket) -> float:
    """Doublings of batch and context between two buckets."""
    batches = abs(one[0] - other[0]) * math.log2(BATCH_RATIO)
    return batches + abs(one[1] - other[1]) * math.log2(CONTEXT_RATIO)


def _features(
    batch_size: int, context: float, num_drafts: int, verified: int | None = None
) -> Features:
    more = 0 if verified is None else verified - num_drafts
    rows = (num_drafts, batch_size * num_drafts, more, batch_size * more)
    return 1.0, batch_size, *rows, batch_size * context
