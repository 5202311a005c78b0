"""A server with MTP under a mixed load, beside one without: nothing hangs, leaks or differs."""

from __future__ import annotations

import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers import AutoTokenizer

from benchmarks import command
from benchmarks.load_client import LoadClient
from benchmarks.load_with_twin import MixedLoad
from benchmarks.machine import taken_on
from benchmarks.request_mix import RequestMix
from benchmarks.server import ServerProcess
from sglang_ascend.models.catalog import model_path

# SGLang's own switches: check the pool after every step and not only at idle, and retract a
# request now and then even where the pool is not full.
POOL_SWITCHES = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "97",
}
# A start of two servers on a busy machine.
START_TIMEOUT_S = 900
LOGGED_FAULTS = re.compile(r".*(?:memory leak|use-after-free|double free|hit an exception).*")


@contextmanager
def both_servers(
    folder: Path, max_total_tokens: int, concurrency: int, logs: Path
) -> Iterator[dict[str, ServerProcess]]:
    """MTP with a pool too small for its load; the twin has room."""
    common = ["--model-path", str(folder), "--dtype", "float32", "--sleep-on-idle"]
    common += ["--max-running-requests", str(concurrency), "--chunked-prefill-size", "256"]
    crowded = ["--speculative-algorithm", "MTP", "--max-total-tokens", str(max_total_tokens)]
    # Admits more requests than the pool can finish, so that some must be retracted.
    crowded += ["--schedule-conservativeness", "0.1"]
    environment = {"OMP_NUM_THREADS": "1"}
    servers: dict[str, ServerProcess] = {}
    try:
        servers["mtp"] = ServerProcess(
            [*common, *crowded], logs / "mtp.log", environment=environment | POOL_SWITCHES
        )
        servers["plain"] = ServerProcess(common, logs / "plain.log", environment=environment)
        for server in servers.values():
            server.wait_until_ready(START_TIMEOUT_S)
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def run_phases(load: MixedLoad, minutes: float, num_phases: int) -> float:
    """Load and rest by turns, a line of progress after each; returns the seconds under load."""
    console, seconds = Console(stderr=True), 0.0
    for phase in range(1, num_phases + 1):
        start = time.monotonic()
        load.run(60 * minutes / num_phases)
        seconds += time.monotonic() - start
        load.check_idle()
        console.print(f"phase {phase} of {num_phases}: {load.describe()}", soft_wrap=True)
        if not load.goes_on:
            break
    load.finish_comparing()
    console.print(f"all compared: {load.describe()}", soft_wrap=True)
    return seconds


def read_log(log: str) -> dict[str, Any]:
    retracted = [int(n) for n in re.findall(r"#retracted_reqs: (\d+)", log)]
    crowded_out = re.findall(r"pool is full\. Retract requests\. #retracted_reqs: (\d+)", log)
    running = [int(n) for n in re.findall(r"Decode batch, #running-req: (\d+)", log)]
    return {
        "retractions": sum(retracted),
        "retractions_by_a_full_pool": sum(int(n) for n in crowded_out),
        "running_median": statistics.median(running) if running else 0,
        "running_max": max(running, default=0),
        "logged_faults": LOGGED_FAULTS.findall(log),
    }


def report_of(load: MixedLoad, seconds: float, log: str) -> dict[str, Any]:
    logged = read_log(log)
    problems = load.problems + [f"the log says: {line}" for line in logged.pop("logged_faults")]
    sums = load.sums
    if not logged["retractions"]:
        problems.append("no request was retracted: raise --minutes.")
    if not sums["radix_hits"] or not sums["compared"]:
        problems.append("no prefix was found again, or nothing was compared: raise --minutes.")
    return {
        "ok": not problems and not load.mismatches,
        "load_s": seconds,
        "requests": sum(load.ends.values()),
        **{end: load.ends[end] for end in ("finished", "aborted", "disconnected", "refused")},
        "failed": load.ends["failed"],
        "kinds": dict(load.kinds.most_common()),
        **logged,
        "radix_hits": sums["radix_hits"],
        "cached_tokens": sums["cached_tokens"],
        "output_tokens": sums["output_tokens"],
        "tokens_per_s": sums["output_tokens"] / seconds,
        "tokens_per_forward": sums["decoded"] / max(1, sums["verified"]),
        "idle": load.idle,
        "compared": sums["compared"],
        "mismatches": load.mismatches,
        "problems": problems,
    }


def main(
    minutes: Annotated[float, typer.Option(help="Minutes under load.")] = 30.0,
    concurrency: Annotated[int, typer.Option(help="Clients, one request each at a time.")] = 32,
    most_requests: Annotated[
        int | None, typer.Option("--requests", help="Ends the load before its time is over.")
    ] = None,
    phases: Annotated[
        int, typer.Option(help="Times that the load stops and the idle server is checked.")
    ] = 6,
    seed: Annotated[int, typer.Option(help="Request i depends on this and on i alone.")] = 0,
    model: Annotated[
        str, typer.Option(help="Catalogue name or checkpoint folder.")
    ] = "nano-deepseek",
    max_total_tokens: Annotated[
        int, typer.Option(help="KV slots of the MTP server; few, so that requests are retracted.")
    ] = 2048,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds after which an unanswered request counts as a hang.")
    ] = 180.0,
    penalties: Annotated[
        bool, typer.Option(help="Mix in penalties and min_new_tokens, which count emitted tokens.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Load a server with MTP for --minutes and compare it with its twin without speculation.

    Requests of a seeded mix: prompts of 1 to 400 tokens, many with a shared prefix; 1 to 200 new
    tokens; greedy and sampled; stop strings, log-probabilities, n=2, streams; regex, JSON schema
    and EBNF grammars; requests that are aborted, whose client goes away, or that are malformed.

    The exit status is 0 only if every request ended as it must, in time; every finished greedy
    one has the tokens, text and finish reason of its twin; no KV slot is in use when the load
    stops; SGLang's checks of the pool, after every step, found nothing; and requests were
    retracted. A run cannot be resumed; a request that failed is in the JSON, to be sent again.

    JSON: `machine`, `commit`, `ok`, `requests` and how they ended (`finished`, `aborted`,
    `disconnected`, `refused`, `failed`), `kinds`, `retractions` and `retractions_by_a_full_pool`,
    `radix_hits`, `cached_tokens`, `output_tokens`, `tokens_per_s`, `tokens_per_forward`, `idle`
    (what was in use each time the load stopped), `compared`, `mismatches`, `problems`.
    """
    folder = Path(model) if Path(model).is_dir() else model_path(model)
    mix = RequestMix(AutoTokenizer.from_pretrained(folder), seed, penalties)
    with (
        tempfile.TemporaryDirectory() as logs,
        both_servers(folder, max_total_tokens, concurrency, Path(logs)) as servers,
    ):
        clients = (LoadClient(servers[name].url, request_timeout) for name in ("mtp", "plain"))
        load = MixedLoad(mix, *clients, concurrency, most_requests or math.inf)
        seconds = run_phases(load, minutes, phases)
        settings = {**taken_on(), "model": model, "seed": seed}
        settings |= {"concurrency": concurrency, "max_total_tokens": max_total_tokens}
        report = settings | report_of(load, seconds, servers["mtp"].log())
        if not report["ok"]:
            Console(stderr=True).print(servers["mtp"].log_tail(), markup=False)
    if as_json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        Console().print(report)
    if not report["ok"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    # Every kind is among so many, and some are retracted, however slow the machine is.
    command.run(main, smoke="--requests 112 --phases 1 --concurrency 8")
