"""Output tokens per second with and without MTP: one server each, one of them busy at a time."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import command
from benchmarks.machine import taken_on
from benchmarks.server import ServerProcess, starting_server
from sglang_ascend.bench import rounds, run
from sglang_ascend.bench.client import Client
from sglang_ascend.bench.command import print_report
from sglang_ascend.bench.figures.ratios import median_interval
from sglang_ascend.bench.options import model_folder
from sglang_ascend.tables import print_whole

HELD_OUT = Path(__file__).parent.parent / "tests" / "data" / "heldout_chat.json"
Server, Measured = TypeVar("Server"), TypeVar("Measured")

console = Console(stderr=True)


@dataclass(frozen=True)
class Round:
    """The same prompts on every server, one after the other; rates in output tokens/s."""

    rates: dict[str, float]
    accept_length: float

    def ratio(self, other: str) -> float:
        return self.rates["mtp"] / self.rates[other]


def measure(
    server: ServerProcess, prompts: Sequence[str], max_new_tokens: int
) -> tuple[float, float]:
    """(tokens per second over all prompts sent at once, tokens per target forward)."""
    measured = rounds.measure(Client(server.url), prompts, max_new_tokens)
    return measured.rate, measured.accept_length


def alternate(
    servers: dict[str, Server],
    measure_one: Callable[[Server, Sequence[str]], Measured],
    prompts: list[str],
    batch: int,
    num_rounds: int,
) -> list[dict[str, Measured]]:
    """What each server gives for the same ``batch`` prompts in each round; the prompts begin anew
    when they are used up."""
    firsts = range(0, num_rounds * batch, batch)
    groups = [[prompts[i % len(prompts)] for i in range(first, first + batch)] for first in firsts]
    results = rounds.alternate(servers, measure_one, groups)
    return list(track(results, f"batch {batch}", total=num_rounds, console=console))


def run_rounds(
    servers: dict[str, ServerProcess],
    prompts: list[str],
    batch: int,
    num_rounds: int,
    max_new_tokens: int,
) -> list[Round]:
    results = alternate(
        servers,
        lambda server, group: measure(server, group, max_new_tokens),
        prompts,
        batch,
        num_rounds,
    )
    return [
        Round({name: rate for name, (rate, _) in one.items()}, one["mtp"][1]) for one in results
    ]


def summarise(results: list[Round]) -> dict[str, float]:
    summary: dict[str, float] = {
        "accept_length": statistics.fmean(r.accept_length for r in results),
        "rounds": len(results),
    }
    for name in results[0].rates:
        summary[f"{name}_tokens_per_s"] = statistics.median(r.rates[name] for r in results)
        if name != "mtp":
            ratios = [entry.ratio(name) for entry in results]
            low, high = median_interval(ratios)
            summary |= {
                f"over_{name}": statistics.median(ratios),
                f"over_{name}_low": low,
                f"over_{name}_high": high,
            }
    return summary


def main(
    model: Annotated[
        str, typer.Option(help="Catalogue name or checkpoint folder.")
    ] = "smollm2-mtp",
    batches: Annotated[
        list[int] | None, typer.Option("--batch", help="Concurrent requests.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Rounds per batch size; prompts per task.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per reply.")] = 128,
    num_steps: Annotated[int | None, typer.Option(help="Draft steps; default: MTP's own.")] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help="JSON list of {domain, prompt} objects.")
    ] = None,
    in_tree: Annotated[
        bool, typer.Option(help="Measure SGLang's own EAGLE order (draft, verify, extend) too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure output tokens/s with and without MTP, alternating, and print the ratio.

    Without --batch and --in-tree: what `sglang-ascend bench` measures, seven tasks, one request at
    a time. With them: held-out prompts of mixed domains, as many at once as --batch says.

    All servers stay up for the whole run and sleep while idle; every round sends the same
    prompts to each, in alternating order. Intervals are bootstraps over rounds.

    JSON: `machine`, `commit`, `model`, `max_new_tokens`, `servers`; `tasks` has for each task, and
    `mean` over them, `rounds`, `plain_tok_s` and `mtp_tok_s` (medians over rounds), `speedup`
    (median of the rounds' ratios), `speedup_low` and `speedup_high` (95 %), `accept_length` (tokens
    per forward of the target), `lookup_accept_length` (of prompt lookup), and `looping`, the same
    of replies that loop; `acceptance` has `histogram` and `per_position`; `num_steps` the
    acceptance length by number of drafts; then every round.

    JSON with --batch: `machine`, `commit`, `model` and, for each batch size, `batch_N` with
    `rounds`, `accept_length`, `plain_tokens_per_s` and `mtp_tokens_per_s` (medians over rounds),
    `over_plain` (median of the rounds' ratios), `over_plain_low` and `over_plain_high` (95 %),
    `all`, every round; with --in-tree the same of EAGLE's order, `in_tree_tokens_per_s` and
    `over_in_tree`.
    """
    folder = model_folder(model)
    if not batches and not in_tree:
        tasks = run.select(rounds.read_tasks(prompts_file or rounds.TASKS), [], num_prompts)
        with run.started_servers(folder, [num_steps] if num_steps else [], "") as addresses:
            figures = run.measure_tasks(addresses, tasks, max_new_tokens, model=model)
        report = {**taken_on(), **figures}
        if as_json:
            print(json.dumps(report, indent=1))
        else:
            print_report(report)
        if "ended_early" in report:
            raise SystemExit(
                f"these are the rounds before a server failed: {report['ended_early']}"
            )
        return
    batches = batches or [1]
    held_out = rounds.read_tasks(prompts_file or HELD_OUT)
    prompts = [prompt for domain in held_out.values() for prompt in domain]
    random.Random(0).shuffle(prompts)
    report = {**taken_on(), "model": model}
    with ExitStack() as stack:
        servers = start_servers(stack, folder, num_steps, in_tree)
        for batch in batches:
            results = run_rounds(servers, prompts, batch, num_prompts, max_new_tokens)
            report[f"batch_{batch}"] = summarise(results) | {"all": [asdict(r) for r in results]}
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print_table(report, batches, [name for name in servers if name != "mtp"])


def start_servers(
    stack: ExitStack, folder: Path, num_steps: int | None, in_tree: bool
) -> dict[str, ServerProcess]:
    steps = [] if num_steps is None else ["--speculative-num-steps", str(num_steps)]
    # The servers share the cores: one that is not asked must not spin.
    common = ("--model-path", str(folder), "--sleep-on-idle")
    starts = {
        "plain": starting_server(*common),
        "mtp": starting_server(*common, "--speculative-algorithm", "MTP", *steps),
    }
    if in_tree:
        starts["in_tree"] = starting_server(
            *common,
            "--speculative-algorithm",
            "EAGLE_IN_TREE",
            *steps,
            PYTHONPATH=str(Path(__file__).parent / "server_parts"),
            BENCHMARK_PARTS="in_tree_eagle",
        )
    servers = {name: stack.enter_context(start) for name, start in starts.items()}
    for server in servers.values():
        server.wait_until_ready()
    return servers


def print_table(report: dict[str, Any], batches: list[int], others: list[str]) -> None:
    table = Table(title=f"{report['model']} on {report['machine']}")
    columns = ["batch", "MTP tok/s", "tokens/forward"]
    for name in others:
        columns += [f"{name} tok/s", f"MTP / {name}", "95 % interval"]
    for column in columns:
        table.add_column(column, justify="right")
    for batch in batches:
        row = report[f"batch_{batch}"]
        cells = [str(batch), f"{row['mtp_tokens_per_s']:.1f}", f"{row['accept_length']:.2f}"]
        for name in others:
            over = f"over_{name}"
            cells += [
                f"{row[f'{name}_tokens_per_s']:.1f}",
                f"{row[over]:.2f}",
                f"{row[f'{over}_low']:.2f} - {row[f'{over}_high']:.2f}",
            ]
        table.add_row(*cells)
    print_whole(table)


if __name__ == "__main__":
    command.run(main, smoke="--model nano-deepseek --num-prompts 1 --max-new-tokens 16")
