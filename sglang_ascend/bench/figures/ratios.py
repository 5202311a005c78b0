"""The spread of a ratio measured over alternating rounds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable

DRAWS = 2000


def middle(draws: Iterable[float]) -> tuple[float, float]:
    """The interval that holds 95 % of them."""
    ordered = sorted(draws)
    return ordered[int(0.025 * len(ordered))], ordered[int(0.975 * len(ordered))]


def median_interval(ratios: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median, by resampling rounds."""
    rng = random.Random(0)
    return middle(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(DRAWS))


def spread(ratios: list[float]) -> dict[str, float]:
    """As the reports name a median and its interval."""
    low, high = median_interval(ratios)
    return {"median": statistics.median(ratios), "low": low, "high": high}
