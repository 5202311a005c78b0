"""What steps cost: estimated from few of them, whose times are noisy and drift."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from sglang_ascend.speculative.adaptive.costs.noise import StepNoise
from sglang_ascend.speculative.adaptive.costs.one_load import Kind, LoadCosts
from sglang_ascend.speculative.adaptive.costs.run import JUMP, Run

# Loads are batches, and contexts, that do not differ by more than these factors.
BATCH_RATIO, CONTEXT_RATIO = 1.3, 4.0
# Of a load's costs to each other a doubling of the context changes less than one of the batch does.
CONTEXT_WEIGHT = 0.25
# A step's cost before any was measured, in units of one at batch 1: constant, per request, per
# draft, per drafted row, per verified draft that the MTP layer does not draft, per row of those,
# per cached token of the batch.
PRIOR_COST = np.array([0.8, 0.02, 0.1, 0.01, 0.02, 0.006, 1e-6])
PRIOR_WEIGHT, PRIOR_SECONDS = 0.01, 0.01

# All below are of logarithms, and standard deviations. What the guess of a cost is off by, beside
# the load's other guesses: where it was measured at another load, at least and more for each
# doubling from there; where another kind of step was measured at this one; at most, where all is
# drafted, and of lookups, which are to be tried.
GUESS_BY_LOAD, DOUBLING_OF_LOAD = 0.15, 0.2
GUESS_BY_KIND, DOUBLING_OF_KIND = 0.2, 0.4
WORST_GUESS, WORST_OF_LOOKUPS = 0.7, 1.0

Load = tuple[int, int]  # numbers of the batch size's bucket and the context's


class Costs:
    """Seconds of a step of a batch that drafts K tokens, K in 0..max_drafts, and verifies as many,
    or more where some were looked up.

    A kind of step that a load has not had is guessed by a linear model, which is fitted to all that
    was measured; the load itself and those near to it weigh most.
    """

    def __init__(self) -> None:
        self._loads: dict[Load, LoadCosts] = {}
        self._noise = StepNoise()
        self.num_steps = 0  # so far, whether they were recorded or not
        self._run: Run | None = None  # now
        self._models: dict[LoadCosts, np.ndarray] = {}

    def record(
        self,
        batch_size: int,
        context: float,
        num_drafts: int,
        seconds: float,
        verified: int | None = None,
    ) -> None:
        """One step, from its start to the next one's."""
        self.num_steps += 1
        kind = num_drafts, num_drafts if verified is None else verified
        here = self.of(batch_size, context)
        i = here.number(kind)
        is_new = not here.num_steps[i] or kind in here.restored
        if is_new:
            # That the machine paused in a step is known by another one beside it.
            first = here.first.pop(kind, None)
            if first is None:
                here.first[kind] = seconds
                return
            if math.log(seconds / first) > JUMP:
                seconds = first
        run, log_seconds = self._run_of(here, kind), math.log(seconds)
        self._noise.record(run, log_seconds)
        here.drift(self.num_steps, self._noise.drift)
        innovation = log_seconds - here.mean[i]
        if not is_new and run.leaves_out(innovation, here.variance(i) + self._noise.own):
            return
        here.observe(kind, innovation, self._noise.own)
        here.restored.discard(kind)
        if here.num_steps[i] in (1, 4):
            self._models.clear()  # what they were fitted to has changed
            here.guess_anew()

    def _run_of(self, here: LoadCosts, kind: Kind) -> Run:
        before = self._run
        if before is not None and (before.load, before.kind) == (here, kind):
            return before
        if before is not None and not before.is_quiet:
            here.jump(0.0)
        self._run = Run(here, kind)
        return self._run

    @property
    def loads(self) -> Iterable[LoadCosts]:
        return self._loads.values()

    def of(self, batch_size: int, context: float) -> LoadCosts:
        load = _load(batch_size, context)
        here = self._loads.get(load)
        if here is None:
            here = LoadCosts(batch_size, context, self.num_steps, self._guess)
            self._loads[load] = here
        return here

    def _guess(self, here: LoadCosts, kind: Kind) -> tuple[float, float]:
        guess = self._modelled(here, kind, here)
        off = [WORST_GUESS if kind[0] == kind[1] else WORST_OF_LOOKUPS]
        off += [GUESS_BY_KIND + DOUBLING_OF_KIND * _apart(kind, other) for other in here.measured()]
        others = [of for of in self._loads.values() if of is not here and kind in of.measured()]
        if others:
            nearest = min(others, key=lambda load: _off(here, load))
            off.append(_off(here, nearest))
            # Of what the model is off by there, a part is here.
            above = nearest.mean[nearest.kinds[kind]] - self._modelled(nearest, kind, here)
            guess += above * GUESS_BY_LOAD / off[-1]
        return guess, min(off)

    def _modelled(self, load: LoadCosts, kind: Kind, here: LoadCosts) -> float:
        """By what was fitted for ``here``."""
        if here not in self._models:
            self._models[here] = self._fit(here)
        return math.log(_features(load, kind) @ self._models[here])

    def _fit(self, here: LoadCosts) -> np.ndarray:
        """Least squares of relative errors, drawn towards the prior at the measured level; loads
        near to ``here`` weigh most."""
        measured = [
            (of, kind, i) for of in self._loads.values() for kind, i in of.measured().items()
        ]
        if not measured:
            return PRIOR_SECONDS * PRIOR_COST
        rows = np.array([_features(load, kind) for load, kind, _ in measured])
        seconds = np.exp([load.mean[i] for load, _, i in measured])
        prior = PRIOR_COST * float(np.median(seconds / (rows @ PRIOR_COST)))
        weights = np.array([GUESS_BY_LOAD / _off(here, load) for load, _, _ in measured])
        relative = rows / seconds[:, None] * prior * weights[:, None]
        gram = relative.T @ relative + PRIOR_WEIGHT * np.eye(len(prior))
        fitted = np.linalg.solve(gram, relative.T @ weights + PRIOR_WEIGHT)
        return prior * np.maximum(fitted, 1e-3)


def _load(batch_size: int, context: float) -> Load:
    batch = round(math.log(batch_size, BATCH_RATIO))
    return batch, round(math.log(max(context, 64.0), CONTEXT_RATIO))


def _off(one: LoadCosts, other: LoadCosts) -> float:
    """By how much a cost of one load is guessed wrong from the other's, which the model says."""
    batches = abs(math.log2(one.batch_size / other.batch_size))
    contexts = abs(math.log2(max(one.context, 64.0) / max(other.context, 64.0)))
    return GUESS_BY_LOAD + DOUBLING_OF_LOAD * (batches + CONTEXT_WEIGHT * contexts)


def _apart(one: Kind, other: Kind) -> float:
    """Doublings of verified rows, and of forwards, between two kinds of step at one load."""
    (drafts, verified), (other_drafts, other_verified) = one, other
    rows = abs(math.log2((verified + 1) / (other_verified + 1)))
    return rows + abs(math.log2((drafts + 1) / (other_drafts + 1)))


def _features(load: LoadCosts, kind: Kind) -> np.ndarray:
    """What PRIOR_COST is of."""
    (drafts, verified), size = kind, load.batch_size
    more = verified - drafts
    rows = (drafts, size * drafts, more, size * more)
    return np.array([1.0, size, *rows, size * load.context])
