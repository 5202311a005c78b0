"""The plot of README: tokens/s without and with MTP, and how often each draft is accepted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_ascend.svg import MTP, PLAIN, Panel, document, text

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT, LEFT = 760, 300, 50
PANEL = Panel(LEFT, 0, 290, HEIGHT - 12)


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
    second = replace(PANEL, left=LEFT + PANEL.width + 70)
    return document(
        WIDTH,
        HEIGHT,
        title,
        [
            *PANEL.bars("output tokens/s: without (grey), with MTP (blue)", speeds, "{:.1f}"),
            *second.bars("drafts 1, 2, 3: share accepted", accepted, "{:.2f}"),
            text(LEFT, HEIGHT - 12, title),
        ],
    )


if __name__ == "__main__":
    typer.run(main)
