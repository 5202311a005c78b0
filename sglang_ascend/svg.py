"""Bars and lines as SVG text: enough for a plot, and nothing to install."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

INK = "#374151"
PLAIN, MTP = "#9aa5b1", "#2563eb"
OTHERS = ("#0d9488", "#d97706", "#9333ea", "#dc2626", "#4d7c0f", "#0369a1", "#be185d")
TOP, BOTTOM = 60, 48  # of a panel: its title and the bars' values, the groups' names

# Groups of bars: a name, and the value and colour of each bar.
Bars = Sequence[tuple[str, Sequence[tuple[float, str]]]]


@dataclass(frozen=True)
class Panel:
    left: float
    top: float
    width: float
    height: float

    def bars(self, title: str, groups: Bars, form: str) -> Iterator[str]:
        """Bars in groups, each with its value above it and the group's name below."""
        yield text(self.left, self.top + 30, title, 'font-weight="bold"')
        highest = max((value for _, bars in groups for value, _ in bars), default=0) or 1
        base, room = self.top + self.height - BOTTOM, self.height - TOP - BOTTOM
        width = self.width / max(1, len(groups))
        for place, (name, bars) in enumerate(groups):
            left, bar = self.left + place * width, 0.7 * width / max(1, len(bars))
            for number, (value, color) in enumerate(bars):
                x, height = left + number * bar, room * value / highest
                box = f'width="{max(1, bar - 2):.0f}" height="{height:.0f}" fill="{color}"'
                yield f'<rect x="{x:.0f}" y="{base - height:.0f}" {box}/>'
                middle = 'text-anchor="middle"'
                yield text(x + bar / 2, base - height - 4, form.format(value), middle)
            yield text(left + 0.35 * width, base + 16, name, 'text-anchor="middle"')


def text(x: float, y: float, words: str, style: str = "", color: str = INK) -> str:
    font = f'font-family="sans-serif" font-size="12" fill="{color}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {font} {style}>{escape(words)}</text>'


def line(points: Iterable[tuple[float, float]], color: str) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2"/>'


def document(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole SVG file on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    white = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", white, *parts, "</svg>"]) + "\n"
