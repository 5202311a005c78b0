"""The ratios of a mixture, and how many texts each set gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Share:
    """A set by its name or the path of its file, and its part of the texts."""

    name: str
    ratio: Fraction


def parse_shares(words: str) -> list[Share]:
    """`name:ratio` of every set, separated by commas.

    Raises:
        ValueError: one is no such pair or named twice, or the ratios do not sum to 1.
    """
    shares = []
    for word in words.split(","):
        name, _, ratio = word.strip().rpartition(":")
        try:
            share = Share(name, Fraction(ratio))
        except (ValueError, ZeroDivisionError):
            share = Share("", Fraction(0))
        if not share.name or share.ratio <= 0:
            raise ValueError(
                f"--calibrate has {word.strip()!r}, which is no set and its ratio above 0; "
                "write it as code:0.4"
            )
        if share.name in {other.name for other in shares}:
            raise ValueError(f"--calibrate names {share.name} twice; give it one ratio")
        shares.append(share)
    total = sum(share.ratio for share in shares)
    if total != 1:
        raise ValueError(f"the ratios of --calibrate sum to {float(total):g}; make them sum to 1")
    return shares


def allocate(ratios: Sequence[Fraction], total: int) -> list[int]:
    """How many of `total` each ratio gets by the largest remainder; the first wins a tie.

    `ratios` sum to 1, and so the result to `total`.
    """
    exact = [ratio * total for ratio in ratios]
    counts = [int(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda place: counts[place] - exact[place])
    for place in order[: total - sum(counts)]:
        counts[place] += 1
    return counts
