"""The grid's figures: JSON, a page in Markdown and a plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_ascend.ptq.evaluate import Score
from sglang_ascend.ptq.grid.cells import CONTROL, GROUP
from sglang_ascend.ptq.grid.run import Options, Scored
from sglang_ascend.ptq.grid.sensitivity import drawing
from sglang_ascend.ptq.report import dots, figure_of, shown_figure


def figures(scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """One row for each cell, in order, over all seeds of its calibration text.

    An interval is of draws of the texts, the same for both sides of a ratio.
    """
    runs: dict[str, list[Scored]] = {}
    for one in scored:
        runs.setdefault(one.cell.name, []).append(one)
    return [_row(found, runs.get(f"{found[0].cell.form} {CONTROL}")) for found in runs.values()]


def _row(found: Sequence[Scored], control: Sequence[Scored] | None) -> dict[str, Any]:
    others = (control or found)[0].scores
    texts = [*zip(_by_text(found), others, strict=True)]
    to_control = figure_of(
        texts, lambda own, other: (_sum(own, "reply_kl"), len(own) * other.reply_kl)
    )
    return {
        "format": found[0].cell.form,
        "method": found[0].cell.method,
        "seeds": [one.seed for one in found if one.seed is not None],
        "bytes": found[0].num_bytes,
        "reply_kl": _mean(texts, "reply_kl", "reply_positions"),
        "reply_kl_of_seeds": [_kl(one.scores) for one in found],
        "reply_kl_to_minmax": to_control if control else None,
        "kl": _mean(texts, "kl", "positions"),
        "top1_agreement": _mean(texts, "agreed", "positions"),
        "acceptance_length": figure_of(
            texts,
            lambda own, _: (sum(sum(s.accepted) for s in own), sum(s.accepted[0] for s in own)),
        ),
    }


def _by_text(found: Sequence[Scored]) -> list[tuple[Score, ...]]:
    """The scores of each text, of every seed."""
    return [*zip(*(one.scores for one in found), strict=True)]


def _sum(scores: Sequence[Score], field: str) -> float:
    return sum(getattr(score, field) for score in scores)


def _mean(texts: Sequence[Any], field: str, per: str) -> dict[str, Any] | None:
    return figure_of(texts, lambda own, _: (_sum(own, field), _sum(own, per)))


def _kl(scores: Sequence[Score]) -> float:
    return _sum(scores, "reply_kl") / _sum(scores, "reply_positions")


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "format": lambda row: row["format"],
    "method": lambda row: row["method"],
    "bytes of all weights": lambda row: f"{row['bytes']:,}",
    "KL of replies, nats": lambda row: shown_figure(row["reply_kl"], "{:.5f}"),
    f"/ {CONTROL}": lambda row: shown_figure(row["reply_kl_to_minmax"], "{:.2f}"),
    "by seed": lambda row: ", ".join(f"{kl:.5f}" for kl in row["reply_kl_of_seeds"]),
    "top-1": lambda row: f"{row['top1_agreement']['value']:.2%}",
    "τ": lambda row: shown_figure(row["acceptance_length"], "{:.2f}"),
}


def _words(options: Options, scored: Sequence[Scored]) -> str:
    texts = scored[0].scores
    positions = sum(text.reply_positions for text in texts)
    minutes = sum(one.seconds for one in scored) / 60
    return (
        f"Weights of the linears that `{options.include}` matches, everything else float; groups "
        f"of {GROUP} where a format has none of its own; asymmetric integers below 8 bits; A8 and "
        "A4 are inputs in the same format. `groups of 64` and `k-means tables` are "
        "judged in memory: no file holds them and nothing serves them. KL to the float model where "
        f"a token of {len(texts)} held-out "
        f"replies comes next, {positions:,} positions; intervals of 95 % over the texts. "
        f"Methods that calibrate do so on {options.calibration_texts} texts of each of "
        f"{options.calibration_seeds} seeds. `/ {CONTROL}` is beside rounding to nearest in the "
        "same format, paired. τ is tokens per verification with the float MTP layer, "
        f"K = {options.num_steps}. The cells took {minutes:.0f} minutes."
    )


def markdown(model: str, words: str, rows: Sequence[dict[str, Any]]) -> str:
    """The page, which shows the plot beside it."""
    table = [
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(cell(row) for cell in COLUMNS.values())} |" for row in rows),
    ]
    plots = [f"![KL of {model}'s cells](grid.svg)", "", "![Sensitivity](sensitivity.svg)"]
    lines = [f"# Formats and methods on {model}", "", words, "", *table, "", *plots]
    return "\n".join(lines) + "\n"


def write(
    folder: Path, options: Options, scored: Sequence[Scored], sensitivity: Mapping[str, Any]
) -> None:
    """`grid.json`, `grid.md`, `grid.svg` and `sensitivity.svg` in `folder`."""
    model, rows = options.against.name, figures(scored)
    named = [(f"{row['format']} {row['method']}", row["reply_kl"]) for row in rows]
    title = f"KL of replies to {model}, nats, with 95 % intervals"
    page = markdown(model, _words(options, scored), rows)
    (folder / "grid.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
    (folder / "grid.svg").write_text(dots(title, named, logarithmic=True), encoding="utf-8")
    (folder / "sensitivity.svg").write_text(drawing(model, sensitivity), encoding="utf-8")
    (folder / "grid.md").write_text(page, encoding="utf-8")
