"""Figures of an evaluation with their intervals: JSON, a table and a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from sglang_ascend import svg
from sglang_ascend.ptq.evaluate import Evaluated, Score

DRAWS = 2000
EVERY = "all"


def figures(results: Sequence[Evaluated]) -> dict[str, Any]:
    """Everything that is printed; the first of `results` is the reference.

    An interval holds 95 % of bootstrap draws of the texts, of one domain or of all. Ratios to the
    last checkpoint are paired: both are of the same draws.
    """
    reference, last = results[0], results[-1]
    domains = sorted({score.domain for score in reference.scores})
    return {
        "reference": str(reference.folder),
        "texts": len(reference.scores),
        "checkpoints": [
            {
                "folder": str(result.folder),
                "bytes": result.num_bytes,
                "of_reference_bytes": round(result.num_bytes / reference.num_bytes, 4),
                "tokens_per_second": round(result.tokens_per_second, 1),
                "domains": {
                    domain: _domain(result, reference, last, domain) for domain in [EVERY, *domains]
                },
            }
            for result in results
        ],
    }


def _domain(
    result: Evaluated, reference: Evaluated, last: Evaluated, domain: str
) -> dict[str, Any]:
    def beside(other: Evaluated) -> list[tuple[Score, Score]]:
        pairs = zip(result.scores, other.scores, strict=True)
        return [pair for pair in pairs if domain in (EVERY, pair[0].domain)]

    rows, to_last = beside(reference), beside(last)
    return {
        "texts": len(rows),
        "positions": sum(own.positions for own, _ in rows),
        "kl": figure_of(rows, lambda own, _: (own.kl, own.positions)),
        "kl_to_last": figure_of(to_last, lambda own, other: (own.kl, other.kl)),
        "reply_kl": figure_of(rows, lambda own, _: (own.reply_kl, own.reply_positions)),
        "reply_kl_to_last": figure_of(to_last, lambda own, other: (own.reply_kl, other.reply_kl)),
        "perplexity": figure_of(rows, lambda own, _: (own.surprise, own.positions), math.exp),
        "perplexity_change": figure_of(
            rows,
            lambda own, other: (own.surprise - other.surprise, own.positions),
            math.expm1,
        ),
        "top1_agreement": figure_of(rows, lambda own, _: (own.agreed, own.positions)),
        "acceptance_length": figure_of(rows, lambda own, _: (sum(own.accepted), own.accepted[0])),
        "kept_drafts": [
            figure_of(rows, lambda own, _, k=k: (own.accepted[k + 1], own.accepted[k]))
            for k in range(len(rows[0][0].accepted) - 1)
        ],
    }


def figure_of(
    rows: Sequence[tuple[Any, Any]],
    parts: Callable[[Any, Any], tuple[float, float]],
    last: Callable[[float], float] = lambda ratio: ratio,
) -> dict[str, Any] | None:
    """last(sum of numerators / sum of denominators) and its interval; None if there is nothing."""
    table = torch.tensor([parts(*row) for row in rows], dtype=torch.float64)
    if table[:, 1].sum() == 0:
        return None
    draws = torch.randint(
        len(table), (DRAWS, len(table)), generator=torch.Generator().manual_seed(0)
    )
    sums = table[draws].sum(1)
    ratios = (sums[:, 0] / sums[:, 1].clamp_min(1e-300)).sort().values
    value, low, high = (
        last(float(ratio))
        for ratio in (
            table[:, 0].sum() / table[:, 1].sum(),
            ratios[int(0.025 * DRAWS)],
            ratios[int(0.975 * DRAWS)],
        )
    )
    return {"value": value, "interval_95": [low, high]}


def tables(report: dict[str, Any]) -> list[Table]:
    """One table for all texts and one for each domain."""
    result = []
    last = Path(report["checkpoints"][-1]["folder"]).name
    for domain in report["checkpoints"][0]["domains"]:
        of_domain = report["checkpoints"][0]["domains"][domain]
        title = f"{domain}: {of_domain['texts']} texts, {of_domain['positions']} positions"
        table = Table(title=title, title_justify="left")
        for column in (
            "checkpoint",
            "bytes",
            "KL, nats",
            f"/ {last}",
            "of replies",
            f"/ {last}",
            "perplexity",
            "change",
            "top-1",
            "τ",
            "kept",
        ):
            table.add_column(column, justify="left" if column == "checkpoint" else "right")
        for checkpoint in report["checkpoints"]:
            table.add_row(*_cells(checkpoint, checkpoint["domains"][domain]))
        result.append(table)
    return result


def _cells(checkpoint: dict[str, Any], domain: dict[str, Any]) -> list[str]:
    length = domain["acceptance_length"]
    kept = [figure for figure in domain["kept_drafts"] if figure]
    return [
        Path(checkpoint["folder"]).name,
        f"{checkpoint['of_reference_bytes']:.1%}",
        shown_figure(domain["kl"], "{:.5f}"),
        shown_figure(domain["kl_to_last"], "{:.2f}"),
        shown_figure(domain["reply_kl"], "{:.5f}"),
        shown_figure(domain["reply_kl_to_last"], "{:.2f}"),
        f"{domain['perplexity']['value']:.3f}",
        shown_figure(domain["perplexity_change"], "{:+.2%}"),
        f"{domain['top1_agreement']['value']:.2%}",
        shown_figure(length, "{:.2f}") or "no chain",
        ", ".join(f"{figure['value']:.2f}" for figure in kept),
    ]


def shown_figure(figure: dict[str, Any] | None, form: str) -> str:
    if figure is None:
        return ""
    low, high = (form.format(bound) for bound in figure["interval_95"])
    return f"{form.format(figure['value'])} ({low} - {high})"


def plot(report: dict[str, Any]) -> str:
    """SVG: KL of every checkpoint but the reference, a dot with its interval, domain by domain."""
    compared = report["checkpoints"][1:]
    rows = [
        (f"{domain}: {Path(one['folder']).name}", one["domains"][domain]["kl"])
        for domain in (compared[0]["domains"] if compared else ())
        for one in compared
    ]
    return dots(f"KL to {Path(report['reference']).name}, nats, with 95 % intervals", rows)


def dots(title: str, rows: Sequence[tuple[str, dict[str, Any]]], logarithmic: bool = False) -> str:
    """SVG: a line for each named figure, with its interval; a logarithmic one begins at the least.

    Figures of a logarithmic plot below 1e-6 are drawn there.
    """
    bounds = [bound for _, figure in rows for bound in figure["interval_95"]]
    most, least = max(bounds, default=0.0) or 1.0, max(min(bounds, default=1.0), 1e-6) / 1.2
    left, width, step, top = 260, 420, 22, 50

    def place(value: float) -> float:
        if not logarithmic:
            return left + width * value / most
        return left + width * math.log(max(value, least) / least) / math.log(most / least)

    parts = [svg.text(10, 24, title, 'font-weight="bold"')]
    for number, (name, figure) in enumerate(rows):
        y = top + number * step
        low, high = (place(bound) for bound in figure["interval_95"])
        middle = place(figure["value"])
        parts += [
            svg.text(left - 10, y + 4, name, 'text-anchor="end"'),
            svg.line([(low, y), (high, y)], svg.MTP),
            f'<circle cx="{middle:.1f}" cy="{y}" r="4" fill="{svg.MTP}"/>',
            svg.text(high + 8, y + 4, f"{figure['value']:.5f}"),
        ]
    return svg.document(left + width + 90, top + len(rows) * step, title, parts)
