"""Output tokens per second with and without MTP: two servers, one of them busy at a time."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import requests
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.ratios import median_interval
from benchmarks.server import ServerProcess
from sglang_ascend.models.catalog import model_path

console = Console(stderr=True)


@dataclass(frozen=True)
class Round:
    """The same prompts on both servers, one after the other."""

    plain_tokens_per_s: float
    mtp_tokens_per_s: float
    accept_length: float

    @property
    def ratio(self) -> float:
        return self.mtp_tokens_per_s / self.plain_tokens_per_s


@contextmanager
def running_server(*arguments: str) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(arguments, Path(folder) / "server.log")
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.stop()


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
    plain: ServerProcess, mtp: ServerProcess, prompts: list[str], batch: int, max_new_tokens: int
) -> list[Round]:
    groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    for server in (plain, mtp):
        measure(server, groups[0], 16)
    rounds = []
    for number, group in enumerate(track(groups, f"batch {batch}", console=console)):
        # Whoever goes second may meet a warmer machine: swap the order every round.
        order = (plain, mtp) if number % 2 == 0 else (mtp, plain)
        results = {server.url: measure(server, group, max_new_tokens) for server in order}
        plain_rate, _ = results[plain.url]
        mtp_rate, accept_length = results[mtp.url]
        rounds.append(Round(plain_rate, mtp_rate, accept_length))
    return rounds


def summarise(rounds: list[Round]) -> dict[str, float]:
    ratios = [entry.ratio for entry in rounds]
    low, high = median_interval(ratios)
    return {
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "plain_tokens_per_s": statistics.median(r.plain_tokens_per_s for r in rounds),
        "mtp_tokens_per_s": statistics.median(r.mtp_tokens_per_s for r in rounds),
        "accept_length": statistics.fmean(r.accept_length for r in rounds),
        "rounds": len(rounds),
    }


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure output tokens/s with and without MTP, alternating, and print the ratio.

    Both servers stay up for the whole run and sleep while idle; every round sends the same
    prompts to both, in alternating order. The interval is a bootstrap over rounds.
    """
    batches = batches or [1]
    folder = Path(model) if Path(model).is_dir() else model_path(model)
    entries = json.loads(prompts_file.read_text(encoding="utf-8"))
    prompts = [entry["prompt"] for entry in entries]
    random.Random(0).shuffle(prompts)
    steps = [] if num_steps is None else ["--speculative-num-steps", str(num_steps)]
    report: dict[str, object] = {"machine": describe_machine(), "model": model}
    # Two servers share the cores: the one that is not asked must not spin.
    common = ("--model-path", str(folder), "--sleep-on-idle")
    with (
        running_server(*common) as plain,
        running_server(*common, "--speculative-algorithm", "MTP", *steps) as mtp,
    ):
        for batch in batches:
            rounds = run_rounds(plain, mtp, prompts[: num_prompts * batch], batch, max_new_tokens)
            report[f"batch_{batch}"] = summarise(rounds) | {"all": [asdict(r) for r in rounds]}
    if as_json:
        print(json.dumps(report, indent=1))
        return
    table = Table(title=f"{model} on {report['machine']}")
    for column in ("batch", "plain tok/s", "MTP tok/s", "ratio", "95 % interval", "tokens/forward"):
        table.add_column(column, justify="right")
    for batch in batches:
        row = report[f"batch_{batch}"]
        table.add_row(
            str(batch),
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['mtp_tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_low']:.2f} - {row['ratio_high']:.2f}",
            f"{row['accept_length']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
