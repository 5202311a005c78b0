"""The plot of README: tokens/s without and with MTP, and how often each draft is accepted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 300, 50, 60, 60
PANEL = 290
PLAIN, MTP = "#9aa5b1", "#2563eb"

Bars = Sequence[tuple[str, Sequence[tuple[float, str]]]]


# Where an evaluation has the acceptance of greedy replies to unseen prompts.
ACCEPTANCES = {"smollm2-mtp": ("all",), "nano-deepseek": ("greedy", "maths")}


def main(
    rates: Annotated[Path, typer.Argument(help="What `make bench ARGS=--json` printed.")],
    smollm2: Annotated[Path, typer.Argument(help="What `sglang-ascend train evaluate` printed.")],
    nano: Annotated[Path, typer.Argument(help="What recipes.nano_deepseek.evaluate printed.")],
    out: Annotated[Path, typer.Option(help="The SVG.")] = ROOT / "docs" / "measured.svg",
) -> None:
    """Draw tokens/s without and with MTP, and how often the draft at each position is accepted.

    A draft's share is of the steps that accepted the drafts before it. docs/measurements.md has the
    commands that print the three JSON files.

    Example: python -m benchmarks.plot bench.json smollm2.json nano.json
    """
    shares = {
        name: read_acceptance(path, keys)
        for (name, keys), path in zip(ACCEPTANCES.items(), (smollm2, nano), strict=True)
    }
    out.write_text(draw(json.loads(rates.read_text(encoding="utf-8")), shares), encoding="utf-8")


def read_acceptance(path: Path, keys: Sequence[str]) -> list[float]:
    """Of draft 1, 2, ..."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for key in keys:
        found = found[key]
    return found["conditional"]


def draw(report: dict[str, Any], acceptances: dict[str, list[float]]) -> str:
    """The SVG's text."""
    speeds = [
        (
            key.replace("_", " "),
            [(row["plain_tokens_per_s"], PLAIN), (row["mtp_tokens_per_s"], MTP)],
        )
        for key, row in report.items()
        if key.startswith("batch_")
    ]
    accepted = [(name, [(share, MTP) for share in values]) for name, values in acceptances.items()]
    title = f"{report['model']}, {report['machine']}, commit {report['commit']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *panel(LEFT, "output tokens/s: without (grey), with MTP (blue)", speeds, "{:.1f}"),
        *panel(LEFT + PANEL + 70, "drafts 1, 2, 3: share accepted", accepted, "{:.2f}"),
        text(LEFT, HEIGHT - 12, title),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def panel(left: int, title: str, groups: Bars, form: str) -> Iterable[str]:
    """Bars in groups, each with its value above it and the group's name below."""
    yield text(left, 30, title, 'font-weight="bold"')
    highest = max(value for _, bars in groups for value, _ in bars)
    width = PANEL / len(groups)
    for place, (name, bars) in enumerate(groups):
        bar = 0.7 * width / len(bars)
        for number, (value, color) in enumerate(bars):
            x = left + place * width + number * bar
            height = (HEIGHT - TOP - BOTTOM) * value / highest
            y = HEIGHT - BOTTOM - height
            box = f'width="{bar - 2:.0f}" height="{height:.0f}" fill="{color}"'
            yield f'<rect x="{x:.0f}" y="{y:.0f}" {box}/>'
            yield text(x + bar / 2, y - 4, form.format(value), 'text-anchor="middle"')
        yield text(
            left + (place + 0.35) * width, HEIGHT - BOTTOM + 16, name, 'text-anchor="middle"'
        )


def text(x: float, y: float, words: str, style: str = "") -> str:
    font = 'font-family="sans-serif" font-size="12" fill="#374151"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {font} {style}>{words}</text>'


if __name__ == "__main__":
    typer.run(main)
