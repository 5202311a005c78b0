"""What a draft step costs and keeps by which tokens drafts may be: one server, told anew for each.

The whole head; the checkpoint's list alone; the list joined by each request's own text, which is
what is served; and other lists.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.command import run
from benchmarks.machine import taken_on
from benchmarks.server import ServerProcess, starting_server
from benchmarks.serving import HELD_OUT, alternate, measure
from sglang_ascend.bench.figures.ratios import spread
from sglang_ascend.bench.options import model_folder
from sglang_ascend.tables import print_whole

PARTS = Path(__file__).parent / "server_parts"
WHOLE, SERVED = "whole", "list + context"
FIELDS = ("draft_ms", "verify_ms", "active_tokens")


@dataclass(frozen=True)
class Way:
    """The server, and what it is told."""

    server: ServerProcess
    file: Path
    told: str

    def measure(self, prompts: Sequence[str], max_new_tokens: int) -> dict[str, float]:
        """Means over the steps of these replies."""
        times = self.file.with_suffix(".times")
        times.unlink(missing_ok=True)
        self.file.write_text(self.told)
        rate, accept_length = measure(self.server, prompts, max_new_tokens)
        rows = [map(float, line.split()) for line in times.read_text().splitlines()]
        columns = zip(FIELDS, zip(*rows, strict=True), strict=True)
        medians = {name: statistics.median(column) for name, column in columns}
        return {"tokens_per_s": rate, "accept_length": accept_length, **medians}


def summarise(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over rounds and ratios to the whole head within them."""
    report: dict[str, Any] = {}
    for name in rounds[0]:
        own = [one[name] for one in rounds]
        report[name] = {field: statistics.median(row[field] for row in own) for field in own[0]}
        report[name]["accept_length"] = statistics.fmean(row["accept_length"] for row in own)
        for field in ("draft_ms", "tokens_per_s"):
            ratios = [one[name][field] / one[WHOLE][field] for one in rounds]
            report[name][f"{field}_over_whole"] = spread(ratios)
    return {**report, "rounds": rounds}


def main(
    model: Annotated[str, typer.Option(help="Catalogue name or folder.")] = "smollm2-mtp",
    lists: Annotated[
        list[Path] | None, typer.Option("--list", help="Another draft_vocabulary.json.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 1,
    rounds: Annotated[int, typer.Option(help="Alternating rounds.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per reply.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure the draft phase of a step on CPU by the tokens that drafts may be, alternating.

    JSON: `machine`, `commit`, `model`, `batch`, and `ways`: by what drafts may be medians over
    rounds of `draft_ms`, `verify_ms` (of one step), `active_tokens` (of one request), and
    `tokens_per_s`, the mean of `accept_length`, and the ratios within the rounds
    `draft_ms_over_whole` and `tokens_per_s_over_whole` with a 95 % interval; then every round.
    """
    prompts = [entry["prompt"] for entry in json.loads(HELD_OUT.read_text(encoding="utf-8"))]
    told = [WHOLE, *(str(path.resolve()) for path in lists or ()), "list", SERVED]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "tokens"
        file.write_text(SERVED)
        start = starting_server(
            "--model-path",
            str(model_folder(model)),
            "--speculative-algorithm",
            "MTP",
            PYTHONPATH=str(PARTS),
            BENCHMARK_PARTS="draft_tokens",
            DRAFT_TOKENS=str(file),
        )
        with start as server:
            server.wait_until_ready()
            ways = {one: Way(server, file, one) for one in told}
            results = alternate(
                ways, lambda way, group: way.measure(group, max_new_tokens), prompts, batch, rounds
            )
    report = {**taken_on(), "model": model, "batch": batch, "ways": summarise(results)}
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print_table(report)


def print_table(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['model']} on {report['machine']}")
    for column in ("drafts", "tokens", "draft ms", "over whole", "tokens/forward", "tokens/s"):
        table.add_column(column, justify="right")
    for name, row in report["ways"].items():
        if name == "rounds":
            continue
        ratio = row["draft_ms_over_whole"]
        table.add_row(
            name,
            f"{row['active_tokens']:.0f}",
            f"{row['draft_ms']:.2f}",
            f"{ratio['median']:.2f} ({ratio['low']:.2f} - {ratio['high']:.2f})",
            f"{row['accept_length']:.2f}",
            f"{row['tokens_per_s']:.1f}",
        )
    print_whole(table)


if __name__ == "__main__":
    run(main, "--rounds 1 --max-new-tokens 8")
