"""Output tokens per second with and without MTP: one server each, one of them busy at a time."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import requests
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import command
from benchmarks.machine import taken_on
from benchmarks.ratios import median_interval
from benchmarks.server import ServerProcess, starting_server
from sglang_ascend.models.catalog import model_path

Server, Measured = TypeVar("Server"), TypeVar("Measured")

console = Console(stderr=True)


@dataclass(frozen=True)
class Round:
    """The same prompts on every server, one after the other; rates in output tokens/s."""

    rates: dict[str, float]
    accept_length: float

    def ratio(self, other: str) -> float:
        return self.rates["mtp"] / self.rates[other]


def chat(server: ServerProcess, prompt: str, max_new_tokens: int) -> tuple[int, int]:
    """(completion tokens, target forwards after the first token) of one greedy reply."""
    reply = requests.post(
        f"{server.url}/v1/chat/completions",
        json={
            "model": "default",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_new_tokens,
            "return_meta_info": True,
        },
        timeout=600,
    )
    reply.raise_for_status()
    body = reply.json()
    meta = body["choices"][0].get("meta_info") or {}
    return body["usage"]["completion_tokens"], meta.get("spec_verify_ct", 0)


def measure(server: ServerProcess, prompts: list[str], max_new_tokens: int) -> tuple[float, float]:
    """(tokens per second over all prompts sent at once, tokens per target forward)."""
    start = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda prompt: chat(server, prompt, max_new_tokens), prompts))
    seconds = time.perf_counter() - start
    tokens = sum(count for count, _ in replies)
    forwards = sum(verifies for _, verifies in replies)
    # The first token of a reply comes from prefill, not from a verify forward.
    accept_length = (tokens - len(replies)) / forwards if forwards else 1.0
    return tokens / seconds, accept_length


def run_rounds(
    servers: dict[str, ServerProcess], prompts: list[str], batch: int, max_new_tokens: int
) -> list[Round]:
    groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    for server in servers.values():
        measure(server, groups[0], 16)
    rounds = []
    for number, group in enumerate(track(groups, f"batch {batch}", console=console)):
        # Whoever goes second may meet a warmer machine: swap the order every round.
        order = list(servers) if number % 2 == 0 else list(servers)[::-1]
        results = {name: measure(servers[name], group, max_new_tokens) for name in order}
        rates = {name: results[name][0] for name in servers}
        rounds.append(Round(rates, results["mtp"][1]))
    return rounds


def alternate(
    servers: dict[str, Server],
    measure_one: Callable[[Server, list[str]], Measured],
    prompts: list[str],
    batch: int,
    rounds: int,
) -> list[dict[str, Measured]]:
    """What each server gives for the same ``batch`` prompts, in ``rounds`` rounds after one to warm
    up; the prompts begin anew when they are used up."""
    results = []
    for number in track(range(-1, rounds), f"batch {batch}", console=console):
        start = max(number, 0) * batch
        group = [prompts[i % len(prompts)] for i in range(start, start + batch)]
        # Whoever goes second may meet a warmer machine: swap the order every round.
        order = list(servers) if number % 2 else list(servers)[::-1]
        one = {name: measure_one(servers[name], group) for name in order}
        if number >= 0:
            results.append(one)
    return results


def summarise(rounds: list[Round]) -> dict[str, float]:
    summary: dict[str, float] = {
        "accept_length": statistics.fmean(r.accept_length for r in rounds),
        "rounds": len(rounds),
    }
    for name in rounds[0].rates:
        summary[f"{name}_tokens_per_s"] = statistics.median(r.rates[name] for r in rounds)
        if name != "mtp":
            ratios = [entry.ratio(name) for entry in rounds]
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
    num_prompts: Annotated[int, typer.Option(help="Held-out prompts used per batch size.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per reply.")] = 128,
    num_steps: Annotated[int | None, typer.Option(help="Draft steps; default: MTP's own.")] = None,
    prompts_file: Annotated[
        Path, typer.Option(help="JSON list of {domain, prompt} objects.")
    ] = Path(__file__).parent.parent / "tests" / "data" / "heldout_chat.json",
    in_tree: Annotated[
        bool, typer.Option(help="Measure SGLang's own EAGLE order (draft, verify, extend) too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure output tokens/s with and without MTP, alternating, and print the ratio.

    All servers stay up for the whole run and sleep while idle; every round sends the same
    prompts to each, in alternating order. The interval is a bootstrap over rounds.

    JSON: `machine`, `commit`, `model` and, for each batch size, `batch_N` with `rounds`,
    `accept_length`, `plain_tokens_per_s` and `mtp_tokens_per_s` (medians over rounds), `over_plain`
    (median of the rounds' ratios), `over_plain_low` and `over_plain_high` (95 %), `all`, every
    round; with --in-tree the same of EAGLE's order, `in_tree_tokens_per_s` and `over_in_tree`.
    """
    batches = batches or [1]
    folder = Path(model) if Path(model).is_dir() else model_path(model)
    entries = json.loads(prompts_file.read_text(encoding="utf-8"))
    prompts = [entry["prompt"] for entry in entries]
    random.Random(0).shuffle(prompts)
    report: dict[str, Any] = {**taken_on(), "model": model}
    with ExitStack() as stack:
        servers = start_servers(stack, folder, num_steps, in_tree)
        for batch in batches:
            rounds = run_rounds(servers, prompts[: num_prompts * batch], batch, max_new_tokens)
            report[f"batch_{batch}"] = summarise(rounds) | {"all": [asdict(r) for r in rounds]}
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
    Console().print(table)


if __name__ == "__main__":
    command.run(main, smoke="--model nano-deepseek --num-prompts 1 --max-new-tokens 16")
