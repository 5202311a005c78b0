"""The plot of `python -m benchmarks.adaptive`."""

from __future__ import annotations

from typing import Any

from benchmarks.turn_state import ADAPTIVE, PLAIN
from sglang_ascend.svg import INK, MTP, OTHERS, document, line, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 340, 50, 90, 50, 60
LINE_HEIGHT = 14


def draw(report: dict[str, Any]) -> str:
    """An SVG: tokens/s over those without speculation, of every K and of the server's choice."""
    points = report["points"]
    names = list(points[0]["tok_s"])
    ratios = {
        name: [point["tok_s"][name] / point["tok_s"][PLAIN] for point in points] for name in names
    }
    highest = 1.05 * max(max(values) for values in ratios.values())
    step = (WIDTH - LEFT - RIGHT) / max(1, len(points) - 1)
    room = HEIGHT - TOP - BOTTOM
    colors = {PLAIN: INK, ADAPTIVE: MTP} | dict(zip(names[1:-1], OTHERS, strict=False))
    title = f"tokens/s over those without speculation, {report['model']}, {report['machine']}"
    parts = [text(LEFT, 24, title, 'font-weight="bold"')]
    ends: list[tuple[float, str]] = []
    for name, values in ratios.items():
        places = [
            (LEFT + i * step, TOP + room * (1 - value / highest)) for i, value in enumerate(values)
        ]
        parts.append(line(places, colors[name]))
        ends.append((places[-1][1] + 4, name))
        if name == ADAPTIVE:
            parts += [f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="{MTP}"/>' for x, y in places]
    lowest = 0.0
    for y, name in sorted(ends):
        lowest = max(y, lowest + LINE_HEIGHT)
        parts.append(text(WIDTH - RIGHT + 6, lowest, name, color=colors[name]))
    for i, point in enumerate(points):
        middle = 'text-anchor="middle"'
        parts.append(text(LEFT + i * step, HEIGHT - 38, str(point["batch"]), middle))
        parts.append(text(LEFT + i * step, HEIGHT - 20, str(point["context"]), middle))
    parts += [text(4, HEIGHT - 38, "batch"), text(4, HEIGHT - 20, "context")]
    return document(WIDTH, HEIGHT, title, parts)
