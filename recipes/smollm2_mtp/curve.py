"""Tokens per forward of smollm2-mtp's layers, from the first on, against the tokens they were
trained on, from provenance.json beside the artifact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_ascend.models.smollm2 import ARTIFACT
from sglang_ascend.svg import MTP, PLAIN, document, line, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 300, 50, 30, 50, 40
LOWEST, HIGHEST = 1.6, 2.5  # tokens per forward
TITLE = "smollm2-mtp, K = 3, greedy held-out chat: tokens per forward by million trained tokens"


@dataclass(frozen=True)
class Trained:
    """A layer: the tokens that it was trained on in all, and what it reaches with its interval."""

    num_tokens: int
    acceptance_length: float
    interval: tuple[float, float]


def layers_of(provenance: dict[str, Any]) -> list[Trained]:
    """Every layer that the artifact's began from, the first one first, and its own."""
    began_from = provenance.get("began_from")
    before = layers_of(began_from) if began_from else []
    reached = provenance.get("acceptance_full_vocabulary", {}).get("all")
    reached = reached or provenance["acceptance_length"]
    num_tokens = provenance["training"]["trained_tokens"] + (before[-1].num_tokens if before else 0)
    return [*before, Trained(num_tokens, reached["acceptance_length"], reached["interval_95"])]


def draw(layers: Sequence[Trained]) -> str:
    most = max(layer.num_tokens for layer in layers)

    def place(num_tokens: int, reached: float) -> tuple[float, float]:
        height = (reached - LOWEST) / (HIGHEST - LOWEST)
        across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + across * num_tokens / most, HEIGHT - BOTTOM - up * height

    parts = [text(LEFT, 24, TITLE, 'font-weight="bold"')]
    for mark in (1.6, 1.8, 2.0, 2.2, 2.4):
        parts.append(line([place(0, mark), place(most, mark)], "#e5e7eb"))
        parts.append(text(LEFT - 30, place(0, mark)[1] + 4, f"{mark:.1f}"))
    middle = 'text-anchor="middle"'
    for layer in layers:
        parts.append(line([place(layer.num_tokens, bound) for bound in layer.interval], PLAIN))
        x, y = place(layer.num_tokens, layer.acceptance_length)
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="{MTP}"/>')
        parts.append(text(x + 18, y + 16, f"{layer.acceptance_length:.2f}", middle))
        parts.append(text(x, HEIGHT - 16, f"{layer.num_tokens / 1e6:.1f}", middle))
    curve = line([place(layer.num_tokens, layer.acceptance_length) for layer in layers], MTP)
    return document(WIDTH, HEIGHT, TITLE, [*parts, curve])


def main(out: Annotated[Path, typer.Argument(help="The SVG file.")]) -> None:
    """Draw the layers of the committed artifact."""
    out.write_text(draw(layers_of(json.loads((ARTIFACT / "provenance.json").read_text()))))


if __name__ == "__main__":
    typer.run(main)
