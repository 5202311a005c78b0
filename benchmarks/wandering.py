"""How far steps are to be trusted on a machine whose speed wanders, and now and then jumps.

The log time of step i is x_i b + w_i + e_i: b of its kind, a random walk w that the machine takes,
and noise e of its own. Steps of e and of w have Student's t distribution, for most are small and a
few are a pause or a jump: normal variables, each of a variance of its own, which are found by
expectation maximisation (Lange, Little and Taylor 1989). So a jump says little of the kinds on its
two sides, and much of what lies between jumps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FREEDOM = 3.0  # degrees of it
ROUNDS = 8
LEAST = 1e-10  # of a variance
UNKNOWN = 100.0  # variance of the machine's speed before the first step
NOTHING = 1e6  # variance of a step that is not there
# Of the largest eigenvalue. No cost is known but up to the machine's speed, which they all share.
RANK = 1e-9


class Block(NamedTuple):
    """Steps that are compared with each other, in the order of time."""

    is_kind: Array  # x [steps, kinds]
    log_times: Array  # [steps]
    # [steps] since the one before, those that do not count included.
    gaps: Array
    is_steady: Array  # [steps] bool: others may be dear of themselves, and are never taken for odd


class Wandering:
    """All blocks, as long as the longest, and what is known of their noise.

    ``own`` and ``drift`` are guesses of the variances of a usual step by itself, and of the walk
    from one to the next.
    """

    def __init__(self, blocks: Sequence[Block], own: float, drift: float) -> None:
        longest = max(len(block.gaps) for block in blocks)
        self._exists = np.array([np.arange(longest) < len(block.gaps) for block in blocks])
        self._is_kind, self._log_times, gaps, is_steady = (
            np.array([_padded(part, longest) for part in parts])
            for parts in zip(*blocks, strict=True)
        )
        self._gaps, self._is_steady = np.maximum(gaps, 1.0), is_steady > 0
        self._own, self._drift = max(own, LEAST), max(drift, LEAST)
        # Variances over those of a usual step; the walk's from the step before to each.
        self._of_own, self._of_walk = np.ones(gaps.shape), np.ones(gaps.shape)
        for _ in range(ROUNDS):
            information, score = (part.sum(0) for part in self.information())
            self._weigh(np.linalg.pinv(information, rcond=RANK, hermitian=True) @ score)

    def information(self) -> tuple[Array, Array]:
        """Of each block about the kinds' costs [blocks, kinds, kinds], and it times the costs that
        fit best [blocks, kinds], whatever the machine's speed was at first."""
        precision = np.linalg.inv(self._walk(0.0) + self._noise())
        weight = precision.sum(-1)
        precision -= weight[:, :, None] * weight[:, None] / weight.sum(-1)[:, None, None]
        seen = self._is_kind.swapaxes(1, 2) @ precision
        return seen @ self._is_kind, (seen @ self._log_times[..., None])[..., 0]

    def _weigh(self, costs: Array) -> None:
        """Each step by the squares of e and of the walk that are expected where the kinds take
        ``costs``."""
        prior = self._walk(UNKNOWN)
        gain = prior @ np.linalg.inv(prior + self._noise())
        residual = self._log_times - self._is_kind @ costs
        walk, covariance = (gain @ residual[..., None])[..., 0], prior - gain @ prior
        variance = np.diagonal(covariance, 0, 1, 2)
        of_own = (residual - walk) ** 2 + variance
        of_walk = np.diff(walk) ** 2 + variance[:, 1:] + variance[:, :-1]
        of_walk = (of_walk - 2 * np.diagonal(covariance, 1, 1, 2)) / self._gaps[:, 1:]
        self._of_own = np.where(self._is_steady, _scale(of_own / self._own), 1.0)
        self._of_walk[:, 1:] = _scale(of_walk / self._drift)
        there = self._exists[:, 1:]
        self._own = max(float((of_own / self._of_own)[self._exists].mean()), LEAST)
        self._drift = max(float((of_walk / self._of_walk[:, 1:])[there].mean()), LEAST)

    def _walk(self, unknown: float) -> Array:
        """Covariance [blocks, steps, steps] of the walk."""
        steps = self._drift * self._gaps * self._of_walk
        steps[:, 0] += unknown
        walked = np.cumsum(steps, axis=1)
        return np.minimum(walked[:, :, None], walked[:, None])

    def _noise(self) -> Array:
        noise = np.where(self._exists, self._own * self._of_own, NOTHING)
        return noise[..., None] * np.eye(noise.shape[1])


def _padded(part: Array, length: int) -> Array:
    return np.pad(part.astype(float), [(0, length - len(part)), *[(0, 0)] * (part.ndim - 1)])


def _scale(squares: Array) -> Array:
    """A step's variance over the usual one, which its expected square is given in."""
    return (FREEDOM + squares) / (FREEDOM + 1)
