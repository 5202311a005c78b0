"""The spread of a ratio measured over alternating rounds."""

from __future__ import annotations

import random
import statistics


def median_interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median, by resampling rounds."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def spread(ratios: list[float]) -> dict[str, float]:
    """As the reports name a median and its interval."""
    low, high = median_interval(ratios)
    return {"median": statistics.median(ratios), "low": low, "high": high}
