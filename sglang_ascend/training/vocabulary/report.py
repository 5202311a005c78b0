"""Coverage against size, language by language, as a table and as a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.table import Table

from sglang_ascend.svg import document, line, text
from sglang_ascend.training.vocabulary.rankings import SIZES, Counts

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 60, 150, 50, 50
LOWEST = 0.5  # of the axis; a list that covers less is of no use


def table(counts: Counts, listed: dict[str, int]) -> Table:
    """A row for each language: its tokens, how many are listed, and what so many cover."""
    sizes = [size for size in SIZES if size <= counts.vocab_size]
    drawn = Table(
        title="Percent of held-out tokens among the most frequent ones, by how many are taken",
        caption="Every tenth document is held out; - is a language with too few of them.",
        box=None,
    )
    for column in ("language", "counted", "listed", *map(_short, sizes)):
        drawn.add_column(column, justify="right", no_wrap=True)
    for language in counts.languages():
        coverage = counts.coverage(language) or {}
        shares = (f"{100 * coverage[size]:.1f}" if size in coverage else "-" for size in sizes)
        row = language, f"{counts.of(language).sum():,}", f"{listed[language]:,}", *shares
        drawn.add_row(*row)
    return drawn


def _short(size: int) -> str:
    return f"{size // 1024}k" if size >= 1024 else str(size)


def plot(counts: Counts) -> str:
    """SVG: a line for each language, coverage over the number of tokens."""
    lines = {name: found for name in counts.languages() if (found := counts.coverage(name))}
    sizes = [size for size in SIZES if size <= counts.vocab_size]
    title = "held-out tokens that a draft vocabulary of so many tokens covers"
    parts = [text(LEFT, 24, title), *_axes(sizes)]
    for number, (name, shares) in enumerate(lines.items()):
        hue = 360 * number // max(1, len(lines))
        color = f"hsl({hue},65%,42%)"
        parts.append(line(((_x(size, sizes), _y(share)) for size, share in shares.items()), color))
        parts.append(text(WIDTH - RIGHT + 12, TOP + 12 + 16 * number, name, color=color))
    return document(WIDTH, HEIGHT, title, parts)


def _axes(sizes: list[int]) -> Iterable[str]:
    for size in sizes:
        yield text(_x(size, sizes), HEIGHT - BOTTOM + 18, _short(size), 'text-anchor="middle"')
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        y = _y(share)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>'
        yield text(LEFT - 8, y + 4, f"{share:.0%}", 'text-anchor="end"')


def _x(size: int, sizes: list[int]) -> float:
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])
    return LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(size) - low) / (high - low)


def _y(share: float) -> float:
    inside = max(share, LOWEST) - LOWEST
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * inside / (1 - LOWEST)
