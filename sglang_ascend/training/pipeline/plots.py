"""Loss and acceptance against trained tokens, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from sglang_ascend.svg import MTP, OTHERS, document, line, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 60, 130, 50, 50
COLORS = (MTP, *OTHERS)
Curve = Sequence[tuple[float, float]]


def loss_plot(log: Sequence[dict[str, Any]]) -> str:
    """Each recursion step's loss, averaged over windows, against trained tokens."""
    tokens = list(accumulate(line["rows"] for line in log))
    window = max(1, len(log) // 100)
    curves: dict[str, Curve] = {}
    for step in range(len(log[0]["losses"]) if log else 0):
        points = []
        for start in range(0, len(log), window):
            part = [line["losses"][step] for line in log[start : start + window]]
            points.append((tokens[min(start + window, len(log)) - 1], sum(part) / len(part)))
        curves[f"draft {step + 1}"] = points
    return _plot("loss of each draft against trained tokens", curves, None)


def acceptance_plot(log: Sequence[dict[str, Any]], looks: Sequence[dict[str, Any]]) -> str:
    """Acceptance at each position on held-out prompts against trained tokens."""
    tokens = dict(
        zip((line["step"] for line in log), accumulate(r["rows"] for r in log), strict=True)
    )
    seen = [look for look in looks if look["step"] in tokens]
    curves: dict[str, Curve] = {}
    for step in range(len(seen[0]["accepted"]) if seen else 0):
        points = [(tokens[look["step"]], look["accepted"][step]) for look in seen]
        curves[f"draft {step + 1}"] = points
    return _plot("held-out drafts accepted against trained tokens", curves, 1.0)


def _plot(title: str, curves: dict[str, Curve], highest: float | None) -> str:
    """`highest` of the vertical axis, or what the points need."""
    points = [point for curve in curves.values() for point in curve]
    right = max((x for x, _ in points), default=1) or 1
    top = highest or max((y for _, y in points), default=1) or 1

    def place(curve: Curve) -> Iterator[tuple[float, float]]:
        for x, y in curve:
            yield (
                LEFT + (WIDTH - LEFT - RIGHT) * x / right,
                HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(y, top) / top,
            )

    parts = [text(LEFT, 24, title, 'font-weight="bold"'), *_axes(right, top)]
    for number, (name, curve) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        parts.append(line(place(curve), color))
        label = f"{name}: {curve[-1][1]:.2f}"
        parts.append(text(WIDTH - RIGHT + 12, TOP + 12 + 18 * number, label, color=color))
    return document(WIDTH, HEIGHT, title, parts)


def _axes(right: float, top: float) -> Iterable[str]:
    for share in (0, 0.25, 0.5, 0.75, 1.0):
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>'
        yield text(LEFT - 8, y + 4, f"{top * share:.2f}", 'text-anchor="end"')
        x = LEFT + (WIDTH - LEFT - RIGHT) * share
        yield text(x, HEIGHT - BOTTOM + 18, _short(right * share), 'text-anchor="middle"')


def _short(count: float) -> str:
    """1234567 -> 1.2M"""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(math.floor(count))
