"""The command `sglang-ascend plan-speculation`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sglang_ascend.refusals import refusals
from sglang_ascend.speculative.adaptive.plan import (
    LinearCosts,
    Plan,
    PlanError,
    draw,
    make_plan,
    read_costs,
)
from sglang_ascend.tables import print_whole

DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def plan_speculation(
    acceptance: Annotated[
        str | None,
        typer.Option(help="Share of drafts 1, 2, ... that are kept, as 0.8,0.7,0.6."),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            help="JSON of measured costs, instead of the flags in ms; also what a server keeps by "
            "SGLANG_ASCEND_ADAPTIVE_COSTS."
        ),
    ] = None,
    target_ms: Annotated[
        float | None, typer.Option(help="One forward of the model for one token.")
    ] = None,
    target_row_ms: Annotated[
        float, typer.Option(help="What a row of a large forward takes, rows of all requests.")
    ] = 0.0,
    draft_ms: Annotated[float, typer.Option(help="One forward of the MTP layer.")] = 0.0,
    draft_row_ms: Annotated[float, typer.Option(help="What a row of it takes.")] = 0.0,
    overhead_ms: Annotated[
        float, typer.Option(help="What a step with drafts takes besides the models.")
    ] = 0.0,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="A batch size; may be repeated.")
    ] = None,
    max_drafts: Annotated[int, typer.Option(min=1, max=15, help="The largest K.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Also write an SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict what drafting K tokens is worth at each batch size, and the best K.

    S(B,K) = E(K) T(B,1) / (T(B,K+1) + K T_draft(B) + T_overhead), with E(K) tokens expected of a
    step. Loads no model and measures nothing: the costs are those that you give.

    Example: `sglang-ascend plan-speculation --acceptance 0.8,0.7,0.6 --target-ms 20
    --target-row-ms 0.5 --draft-ms 1.5`
    """
    with refusals():
        rates = None if acceptance is None else _rates(acceptance)
        if costs is not None and batch:
            raise PlanError("--costs has batch sizes of its own: leave out --batch.")
        if costs is not None:
            if target_ms is not None or any((target_row_ms, draft_ms, draft_row_ms, overhead_ms)):
                raise PlanError("--costs has times of its own: leave out the flags in ms.")
            in_file, of_batch = read_costs(costs)
            rates = rates or in_file
        elif target_ms is not None:
            machine = LinearCosts(target_ms, target_row_ms, draft_ms, draft_row_ms, overhead_ms)
            of_batch = {size: machine.at(size, max_drafts) for size in batch or DEFAULT_BATCHES}
        else:
            raise PlanError("no cost was given: --target-ms, or --costs FILE.")
        plan = make_plan(rates or [], of_batch, max_drafts)
        if plot is not None:
            plot.write_text(draw(plan), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(plan.to_json(), indent=2))
    else:
        _print(plan)


def _rates(acceptance: str) -> list[float]:
    try:
        return [float(rate) for rate in acceptance.split(",")]
    except ValueError:
        raise PlanError(f"--acceptance {acceptance} is no list such as 0.8,0.7,0.6.") from None


def _print(plan: Plan) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="predicted speed-up over plain decode")
    table.add_column("batch", justify="right")
    for k in range(len(plan.rows[0].speedups)):
        table.add_column(f"K = {k}", justify="right")
    table.add_column("best", justify="right")
    for row in plan.rows:
        cells = [
            Text(f"{value:.2f}", "bold" if k == row.best else "")
            for k, value in enumerate(row.speedups)
        ]
        table.add_row(str(row.batch), *cells, f"K = {row.best}")
    print_whole(table)
