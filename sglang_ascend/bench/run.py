"""A whole measurement: servers that run or are started, their rounds, and the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from sglang_ascend import __version__
from sglang_ascend.bench.client import Client, ServerError
from sglang_ascend.bench.figures.machine import describe_machine
from sglang_ascend.bench.figures.report import paired, summarise
from sglang_ascend.bench.options import MTP, flags_of
from sglang_ascend.bench.rounds import Round, run_tasks
from sglang_ascend.bench.server import starting_server

SAID = ("version", "model_path", "dtype", "speculative_algorithm", "speculative_num_steps")
console = Console(stderr=True)


def select(
    tasks: Mapping[str, Sequence[str]], names: Sequence[str], num_prompts: int | None
) -> dict[str, Sequence[str]]:
    """The tasks of these names, or all; of each the first prompts."""
    if missing := set(names) - set(tasks):
        raise ValueError(f"{min(missing)!r} is not a task: choose of {', '.join(tasks)}.")
    return {name: tasks[name][:num_prompts] for name in names or tasks}


@contextmanager
def started_servers(
    folder: Path, num_steps: Sequence[int], server_args: str
) -> Iterator[dict[str, str]]:
    """Addresses of `plain`, `mtp` (of the first number of steps) and `mtp_K` of the others.

    Raises:
        ValueError: with these flags `plain` would speculate.
    """
    asked = flags_of(server_args)
    if any(flag.startswith("--speculative-algo") for flag in asked):
        raise ValueError(
            f"one of the servers is without speculation and one with {MTP[1]}: leave "
            f"{MTP[0]} out of --server-args, or start both for --url and --plain-url."
        )
    # The servers share the machine: one that is not asked must not spin.
    common = ("--model-path", str(folder), "--sleep-on-idle", *asked)
    flags = {"plain": (), "mtp": MTP}
    for place, steps in enumerate(num_steps):
        name = f"mtp_{steps}" if place else "mtp"
        flags[name] = (*MTP, "--speculative-num-steps", str(steps))
    with ExitStack() as stack, console.status(f"starting {len(flags)} servers of {folder.name}"):
        servers = {
            name: stack.enter_context(starting_server(*common, *own)) for name, own in flags.items()
        }
        for server in servers.values():
            server.wait_until_ready()
        kept = stack.pop_all()
    with kept:
        yield {name: server.url for name, server in servers.items()}


def measure_tasks(
    addresses: Mapping[str, str],
    tasks: Mapping[str, Sequence[str]],
    max_new_tokens: int,
    batch: int = 1,
    temperature: float = 0.0,
    model: str | None = None,
) -> dict[str, Any]:
    """The report; the servers are `plain` and `mtp`, one of them, or `a` and `b`.

    Where a server fails behind the first round, `ended_early` says why, and the rounds before it
    are what is reported.

    Raises:
        ValueError: `plain` speculates.
    """
    clients = {name: Client(url) for name, url in addresses.items()}
    infos = {name: client.info() for name, client in clients.items()}
    if drafts_by := infos.get("plain", {}).get("speculative_algorithm"):
        raise ValueError(
            f"{addresses['plain']} drafts by {drafts_by}, and `plain` is without speculation: give "
            "the addresses the other way round, or both to --compare."
        )
    model = model or Path(next(iter(infos.values()))["model_path"]).name
    total = sum(-(-len(prompts) // batch) for prompts in tasks.values())
    running = run_tasks(clients, tasks, max_new_tokens, batch, temperature)
    rounds: list[Round] = []
    ended_early: dict[str, str] = {}
    try:
        for one in track(running, "rounds", total=total, console=console):
            rounds.append(one)
    except ServerError as error:
        if not rounds:
            raise
        ended_early["ended_early"] = str(error)
    return {
        "machine": describe_machine(),
        "code": f"sglang-ascend {__version__}",
        "model": model,
        "max_new_tokens": max_new_tokens,
        "batch": min(batch, max(map(len, tasks.values()))),
        "temperature": temperature,
        "servers": {
            name: {"url": addresses[name], **{key: info.get(key) for key in SAID}}
            for name, info in infos.items()
        },
        **ended_early,
        **_figures(rounds),
    }


def compare_reports(paths: Mapping[str, Path]) -> dict[str, Any]:
    """Two reports as if their main servers had taken turns; they did not, so machines may drift.

    Raises:
        ValueError: a file is no report, or the two share no round.
    """
    try:
        reports = {name: _read_json(path) for name, path in paths.items()}
        rounds = paired(reports)
        one, other = reports.values()
        same = {key: one[key] for key in ("max_new_tokens", "batch")}
        both = {
            key: one[key] if one[key] == other[key] else f"{one[key]} | {other[key]}"
            for key in ("machine", "code", "model", "temperature")
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"these are not two reports of sglang-ascend bench: {error!r}.") from None
    servers = {name: report["servers"][report["main"]] for name, report in reports.items()}
    return {**both, **same, "servers": servers, **_figures(rounds)}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{path} is no report of sglang-ascend bench: {error}.") from None


def _figures(rounds: Sequence[Round]) -> dict[str, Any]:
    names = list(rounds[0].samples)
    baseline, main = (names[0], names[1]) if len(names) > 1 else (None, names[0])
    return {
        "baseline": baseline,
        "main": main,
        **summarise(rounds, baseline, main),
        "rounds": [asdict(one) for one in rounds],
    }
