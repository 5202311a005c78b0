"""One report as one SVG: speed of each task, and acceptance in three views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_ascend.svg import MTP, OTHERS, PLAIN, Bars, Panel, document, text

WIDTH, HEIGHT, LEFT, GAP = 960, 560, 40, 40


def draw(report: Mapping[str, Any]) -> str:
    """The SVG's text; a task without figures has no bars."""
    colors = dict.fromkeys([report["baseline"]] if report["baseline"] else [], PLAIN)
    colors[report["main"]] = MTP
    rest = (name for name in report["acceptance"] if name not in colors)
    colors |= dict(zip(rest, OTHERS, strict=False))
    speeds = [
        (task, [(row[f"{name}_tok_s"], color) for name, color in colors.items() if row["rounds"]])
        for task, row in report["tasks"].items()
    ]
    title = f"{report['model']}, {report['machine']}, {report['code']}"
    parts = [
        *Panel(LEFT, 0, WIDTH - 2 * LEFT, 270).bars("output tokens/s", speeds, "{:.1f}"),
        *_legend(colors),
    ]
    width = (WIDTH - 2 * LEFT - 2 * GAP) / 3
    for place, (name, groups, form) in enumerate(_acceptance(report)):
        left = LEFT + place * (width + GAP)
        parts += Panel(left, 270, width, 250).bars(name, groups, form)
    return document(WIDTH, HEIGHT, title, [*parts, text(LEFT, HEIGHT - 12, title)])


def _legend(colors: Mapping[str, str]) -> list[str]:
    parts, x = [], 200
    for name, color in colors.items():
        parts.append(f'<rect x="{x}" y="20" width="10" height="10" fill="{color}"/>')
        parts.append(text(x + 14, 30, name))
        x += 34 + 7 * len(name)
    return parts


def _acceptance(report: Mapping[str, Any]) -> list[tuple[str, Bars, str]]:
    """Of the main server, and acceptance length by number of drafts; measured ones are blue."""
    found = report["acceptance"].get(report["main"])
    if not found:
        return []
    shares = [(str(n), [(share or 0.0, MTP)]) for n, share in enumerate(found["per_position"], 1)]
    counts = [
        (str(n), [(count / found["forwards"], MTP)]) for n, count in enumerate(found["histogram"])
    ]
    lengths = [
        (key, [(row["accept_length"], MTP if row["measured"] else PLAIN)])
        for key, row in report["num_steps"].items()
    ]
    return [
        ("share accepted of draft k, after k - 1", shares, "{:.2f}"),
        ("share of forwards that accepted n", counts, "{:.2f}"),
        ("tokens per forward with K drafts (grey: cut)", lengths, "{:.2f}"),
    ]
