"""Which dtype serves fastest on this CPU, and how much of a plain step its packed linears are.

Four servers, alternating in one run: bfloat16 and float32, each with and without MTP.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.command import run
from benchmarks.machine import taken_on
from benchmarks.server import ServerProcess, starting_server
from benchmarks.serving import alternate, measure
from sglang_ascend.bench.figures.ratios import spread
from sglang_ascend.models.catalog import model_path
from sglang_ascend.tables import print_whole

PARTS = Path(__file__).parent / "server_parts"
PROMPTS = Path(__file__).parent.parent / "tests" / "data" / "heldout_chat.json"
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Served:
    """One server, and the file in which it leaves its decode iterations."""

    server: ServerProcess
    times: Path

    def measure(self, prompts: list[str], max_new_tokens: int) -> dict[str, float]:
        """Output tokens/s, tokens per target forward, and the median step in ms."""
        self.times.unlink(missing_ok=True)
        rate, accept_length = measure(self.server, prompts, max_new_tokens)
        while not self.times.is_file():
            time.sleep(0.05)
        rows = [row for row in json.loads(self.times.read_text()) if row[0] == len(prompts)]
        return {
            "tokens_per_s": rate,
            "accept_length": accept_length,
            "step_ms": 1e3 * statistics.median(row[1] for row in rows),
            "linear_ms": 1e3 * statistics.median(row[2] for row in rows),
        }


def start_servers(stack: ExitStack, folder: Path) -> dict[str, Served]:
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    servers = {}
    for dtype in DTYPES:
        for name, flags in (("plain", ()), ("mtp", ("--speculative-algorithm", "MTP"))):
            times = scratch / f"{name}-{dtype}.json"
            # The servers share the cores: one that is not asked must not spin.
            common = ("--model-path", str(folder), "--sleep-on-idle", "--dtype", dtype)
            start = starting_server(
                *common,
                *flags,
                PYTHONPATH=str(PARTS),
                BENCHMARK_PARTS="linear_times",
                STEP_TIMES=str(times),
            )
            servers[f"{name}-{dtype}"] = Served(stack.enter_context(start), times)
    for served in servers.values():
        served.server.wait_until_ready()
    return servers


def summarise(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians of each server, and the ratios within the rounds."""

    def ratios(over: tuple[str, str], under: tuple[str, str]) -> dict[str, float]:
        return spread([r[over[0]][over[1]] / r[under[0]][under[1]] for r in rounds])

    rate = "tokens_per_s"
    summary: dict[str, Any] = {
        name: {field: statistics.median(one[name][field] for one in rounds) for field in fields}
        for name, fields in rounds[0].items()
    }
    for dtype in DTYPES:
        plain, mtp = f"plain-{dtype}", f"mtp-{dtype}"
        summary[f"mtp_over_plain_{dtype}"] = ratios((mtp, rate), (plain, rate))
        step = ratios((plain, "step_ms"), (plain, "linear_ms"))
        summary[f"plain_step_over_linears_{dtype}"] = step
    for name in ("plain", "mtp"):
        fast, slow = (f"{name}-{dtype}" for dtype in DTYPES)
        summary[f"bfloat16_over_float32_{name}"] = ratios((fast, rate), (slow, rate))
    return summary | {"rounds": rounds}


def main(
    model: Annotated[str, typer.Option(help="Catalogue name or folder.")] = "smollm2-mtp",
    batches: Annotated[list[int], typer.Option("--batch", help="Requests at once.")] = [1],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Alternating rounds per batch size.")] = 9,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per reply.")] = 96,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure plain and MTP serving in bfloat16 and in float32, alternating.

    JSON: `machine`, `commit`, `model` and, for each batch size, `batch_N` with `rounds`, the
    medians of each server (`tokens_per_s`, `accept_length`, `step_ms` and `linear_ms`: one decode
    iteration, and its time within packed linears), and ratios with a 95 % interval:
    `mtp_over_plain_bfloat16`, `plain_step_over_linears_bfloat16` (and float32), and
    `bfloat16_over_float32_plain` (and mtp).
    """
    folder = Path(model) if Path(model).is_dir() else model_path(model)
    prompts = [entry["prompt"] for entry in json.loads(PROMPTS.read_text(encoding="utf-8"))]
    report: dict[str, Any] = {**taken_on(), "model": model}
    with ExitStack() as stack:
        servers = start_servers(stack, folder)
        for batch in batches:
            results = alternate(
                servers,
                lambda served, group: served.measure(group, max_new_tokens),
                prompts,
                batch,
                rounds,
            )
            report[f"batch_{batch}"] = summarise(results)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print_table(report, batches)


def print_table(report: dict[str, Any], batches: list[int]) -> None:
    table = Table(title=f"{report['model']} on {report['machine']}")
    for column in ("batch", "dtype", "plain tok/s", "MTP tok/s", "MTP / plain", "tokens/forward"):
        table.add_column(column, justify="right")
    table.add_column("plain step / linears, ms", justify="right")
    for batch in batches:
        row = report[f"batch_{batch}"]
        for dtype in DTYPES:
            plain, mtp = row[f"plain-{dtype}"], row[f"mtp-{dtype}"]
            step = row[f"plain_step_over_linears_{dtype}"]["median"]
            table.add_row(
                str(batch),
                dtype,
                f"{plain['tokens_per_s']:.1f}",
                f"{mtp['tokens_per_s']:.1f}",
                f"{row[f'mtp_over_plain_{dtype}']['median']:.2f}",
                f"{mtp['accept_length']:.2f}",
                f"{plain['step_ms']:.1f} / {plain['linear_ms']:.1f} = {step:.2f}",
            )
    print_whole(table)


if __name__ == "__main__":
    run(main, "--model nano-deepseek --rounds 1 --max-new-tokens 8")
