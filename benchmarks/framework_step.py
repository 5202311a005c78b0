"""Framework time of a decode step: everything but the model forwards, which are instant stubs.

Three servers, alternating in one run: no speculation, SGLang's own EAGLE order (made runnable here
by stand-ins for its Triton kernels) and MTP. A step is one iteration of the scheduler's loop.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import requests
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import command
from benchmarks.machine import taken_on
from benchmarks.server import ServerProcess
from sglang_ascend.bench.figures.ratios import median_interval
from sglang_ascend.models.catalog import model_path
from sglang_ascend.tables import print_whole

PARTS = Path(__file__).parent / "server_parts"
TOKENS_PER_STEP = {"plain": 1, "eagle": 2, "mtp": 2}
ALGORITHMS = {"plain": (), "eagle": ("EAGLE_IN_TREE",), "mtp": ("MTP",)}
# Iterations at either end of a round, in which requests still join or already leave.
MARGIN = 4
console = Console(stderr=True)


@dataclass(frozen=True)
class Stubbed:
    """A server of instant models, and the file in which it leaves its step times."""

    server: ServerProcess
    times: Path

    def run(self, batch: int, max_new_tokens: int) -> list[float]:
        """Seconds of each full step while ``batch`` requests are answered."""
        self.times.unlink(missing_ok=True)
        reply = requests.post(
            f"{self.server.url}/generate",
            json={
                "input_ids": [[5 + i] for i in range(batch)],
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": max_new_tokens,
                    "ignore_eos": True,
                },
            },
            timeout=600,
        )
        reply.raise_for_status()
        while not self.times.is_file():
            time.sleep(0.05)
        rows = json.loads(self.times.read_text())
        return [seconds for size, seconds in rows if size == batch][MARGIN:-MARGIN]


@contextmanager
def stubbed_server(name: str, folder: Path, num_steps: int, scratch: Path) -> Iterator[Stubbed]:
    times = scratch / f"{name}.json"
    parts = ["instant_models", *(["in_tree_eagle"] if name == "eagle" else [])]
    arguments = ["--model-path", str(folder), "--sleep-on-idle", "--dtype", "float32"]
    arguments += ["--max-running-requests", "128", "--decode-log-interval", "1000"]
    for algorithm in ALGORITHMS[name]:
        arguments += ["--speculative-algorithm", algorithm]
        arguments += ["--speculative-num-steps", str(num_steps)]
    environment = {
        "PYTHONPATH": str(PARTS),
        "BENCHMARK_PARTS": ",".join(parts),
        "STEP_TIMES": str(times),
        "OMP_NUM_THREADS": "1",
    }
    server = ServerProcess(arguments, scratch / f"{name}.log", environment=environment)
    try:
        yield Stubbed(server, times)
    finally:
        server.stop()


def measure(servers: dict[str, Stubbed], batch: int, rounds: int, steps: int) -> dict:
    """Median milliseconds per step of each server, and the ratios of the rounds."""
    medians: dict[str, list[float]] = {name: [] for name in servers}
    for number in track(range(-1, rounds), f"batch {batch}", console=console):
        order = list(servers) if number % 2 else list(servers)[::-1]
        for name in order:
            seconds = servers[name].run(batch, TOKENS_PER_STEP[name] * (steps + 2 * MARGIN))
            if number >= 0:
                medians[name].append(1e3 * statistics.median(seconds))
    plain, eagle, mtp = (medians[name] for name in ("plain", "eagle", "mtp"))
    over_plain = [m / p for m, p in zip(mtp, plain, strict=True)]
    # An excess may be nothing or less: then MTP costs what a plain step does.
    excess = [(e - p) / max(m - p, 1e-6) for e, m, p in zip(eagle, mtp, plain, strict=True)]
    return {
        **{f"{name}_ms": statistics.median(values) for name, values in medians.items()},
        "mtp_over_plain": statistics.median(over_plain),
        "mtp_over_plain_interval": median_interval(over_plain),
        "excess_ratio": statistics.median(excess),
        "excess_ratio_interval": median_interval(excess),
        "all": medians,
    }


def main(
    model: Annotated[str, typer.Option(help="Catalogue name or folder.")] = "nano-deepseek",
    batches: Annotated[list[int] | None, typer.Option("--batch", help="Requests at once.")] = None,
    num_steps: Annotated[int, typer.Option(help="Drafted tokens K.")] = 3,
    rounds: Annotated[int, typer.Option(help="Alternating rounds per batch size.")] = 7,
    steps: Annotated[int, typer.Option(help="Decode steps per round.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure the framework's milliseconds per decode step, without the models.

    JSON: `machine`, `commit`, `model`, `num_steps` and, for each batch size, `batch_N` with
    `plain_ms`, `eagle_ms` and `mtp_ms` (medians over rounds of a round's median step);
    `mtp_over_plain` and `excess_ratio` (EAGLE's milliseconds above plain over MTP's, medians of the
    rounds' ratios), each with its 95 % bootstrap `mtp_over_plain_interval` and
    `excess_ratio_interval`; `all`, every round.
    """
    batches = batches or [1, 8, 32, 128]
    folder = Path(model) if Path(model).is_dir() else model_path(model)
    report: dict = {**taken_on(), "model": model, "num_steps": num_steps}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        servers = {
            name: stack.enter_context(stubbed_server(name, folder, num_steps, Path(scratch)))
            for name in ALGORITHMS
        }
        for stubbed in servers.values():
            stubbed.server.wait_until_ready()
        for batch in batches:
            report[f"batch_{batch}"] = measure(servers, batch, rounds, steps)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    table = Table(title=f"framework ms per step, K={num_steps}, {report['machine']}")
    for column in ("batch", "plain", "EAGLE order", "MTP", "MTP / plain", "excess EAGLE / MTP"):
        table.add_column(column, justify="right")
    for batch in batches:
        row = report[f"batch_{batch}"]
        times = [f"{row[f'{name}_ms']:.2f}" for name in ALGORITHMS]
        table.add_row(
            str(batch), *times, f"{row['mtp_over_plain']:.2f}", f"{row['excess_ratio']:.1f}"
        )
    print_whole(table)


if __name__ == "__main__":
    command.run(main, smoke="--batch 2 --rounds 1 --steps 5")
