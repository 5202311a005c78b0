"""A server that chooses K by itself against each fixed K and no speculation, load by load."""

from __future__ import annotations

import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import requests
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks import command
from benchmarks.adaptive_cycles import cycles_of
from benchmarks.adaptive_plot import draw
from benchmarks.adaptive_points import Point, mean_contexts, mean_speedups
from benchmarks.machine import taken_on
from benchmarks.server import ServerProcess, starting_server
from benchmarks.turn_state import ADAPTIVE, PLAIN, TurnState
from sglang_ascend.bench.options import model_folder
from sglang_ascend.bench.rounds import TASKS, read_tasks
from sglang_ascend.files import refuse_unwritable
from sglang_ascend.refusals import refusals
from sglang_ascend.tables import print_whole

ROOT, PARTS = Path(__file__).parents[1], Path(__file__).parent / "server_parts"
LEAST_SETTLING = 2  # runs of a load in which its costs are learnt
MOST_IN_VAIN = 5  # runs of a load in which its batch was never full
console = Console(stderr=True)


@dataclass(frozen=True)
class Turns:
    """A server with drafts and one without, which take turns at the same requests."""

    drafting: ServerProcess
    plain: ServerProcess
    folder: Path
    state: TurnState

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int, alone: bool = False) -> None:
        """Until the first reply of either server has its tokens, so that the batch is full all the
        time: what a server does with few requests left is another batch's figure.

        ``alone`` the server with drafts answers, and chooses by itself.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        servers = [self.drafting] if alone else [self.drafting, self.plain]
        self.state.begin(len(prompts), alone)
        with ThreadPoolExecutor(len(servers) * len(prompts)) as pool:
            replies = [
                pool.submit(server.generate, input_ids=prompt, sampling_params=sampling)
                for prompt in prompts
                for server in servers
            ]
            wait(replies, return_when=FIRST_COMPLETED)
            self.state.stop()
            for server in servers:
                self._post(server, "abort_request", json={"abort_all": True})
            for reply in replies:
                reply.result()
        for server in servers:
            self._post(server, "flush_cache?timeout=30")

    def _post(self, server: ServerProcess, what: str, **body: Any) -> None:
        requests.post(f"{server.url}/{what}", timeout=60, **body).raise_for_status()

    def lines(self) -> list[dict[str, Any]]:
        """What the servers wrote since the last call; steps in the order of time, which is the
        clock of both.
        """
        found: list[dict[str, Any]] = []
        for name in ("drafts.jsonl", "plain.jsonl"):
            path = self.folder / name
            found += map(json.loads, path.read_text().splitlines())
            os.truncate(path, 0)
        return sorted(found, key=lambda line: line.get("begun", 0.0))


def contexts_of(tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> Iterator[list[int]]:
    """Prompts of ``length`` tokens that end in a question of the benchmark's tasks."""
    texts = [text for prompts in read_tasks(TASKS).values() for text in prompts]
    rng = random.Random(seed)
    while True:
        tokens: list[int] = []
        while len(tokens) < length:
            turn = [{"role": "user", "content": rng.choice(texts)}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            tokens = [*tokenizer.encode(str(text), add_special_tokens=False), *tokens]
        yield tokens[-length:]


def measure(
    turns: Turns,
    loads: list[tuple[int, int]],
    make_prompts: Any,
    seconds: float,
    settle: float,
    least_cycles: int,
    tokens: int,
) -> Iterator[Point]:
    """Each load for so long, and for so many cycles at least."""
    for seed, (context, batch) in enumerate(track(loads, "loads", console=console)):
        source = make_prompts(context, seed)
        lines, steps, in_vain = [], [], 0
        begun = time.perf_counter()
        for run in itertools.count():
            # Of many long prompts one run's decoding is a few steps.
            if run >= LEAST_SETTLING and time.perf_counter() - begun >= settle:
                break
            turns.run([next(source) for _ in range(batch)], tokens, alone=True)
        begun = time.perf_counter()
        for run in itertools.count():
            turns.run([next(source) for _ in range(batch)], tokens)
            found = turns.lines()
            # The first reply of few tokens may end before the last request has come.
            in_vain = 0 if found else in_vain + 1
            if in_vain == MOST_IN_VAIN:
                raise SystemExit(f"{batch} requests never ran at once; the server's log says why.")
            lines += [{"run": run, **line} for line in found]
            steps = [line for line in lines if "name" in line]
            num_cycles = len({step["cycle"] for step in steps})
            if time.perf_counter() - begun > seconds and num_cycles >= least_cycles:
                break
        cycles = cycles_of(steps)
        predicted = mean_speedups([line["predicted"] for line in lines if "predicted" in line])
        point = Point(context, batch, cycles, predicted, mean_contexts(steps))
        rates = ", ".join(f"{name} {rate:.1f}" for name, rate in point.rates.items())
        console.print(f"context {context}, batch {batch}, tokens/s: {rates}")
        yield point


def start(
    stack: ExitStack,
    folder: Path,
    max_drafts: int,
    max_fixed: int,
    turn: int,
    num_tokens: int,
    scratch: Path,
) -> Turns:
    """Both servers, with room for ``num_tokens``."""
    state = TurnState.made(scratch)
    # The servers share the cores: one that is not asked must not spin.
    common = ("--model-path", str(folder), "--sleep-on-idle", "--max-running-requests", "128")
    common += ("--max-total-tokens", str(num_tokens))
    drafts = ("--speculative-algorithm", "MTP", "--speculative-num-steps", str(max_drafts))
    environment = {
        "PYTHONPATH": os.pathsep.join(
            [str(PARTS), str(ROOT), *os.environ.get("PYTHONPATH", "").split()]
        ),
        "BENCHMARK_PARTS": "turns",
        "TURNS": str(scratch),
        "STEPS_OF_A_TURN": str(turn),
        "MAX_FIXED": str(max_fixed),
    }
    plain, adaptive = (
        stack.enter_context(starting_server(*common, *more, **environment, BENCHMARK_ROLE=role))
        for role, more in ((PLAIN, ()), (ADAPTIVE, (*drafts, "--speculative-adaptive")))
    )
    for server in (plain, adaptive):
        server.wait_until_ready()
    return Turns(adaptive, plain, scratch, state)


def main(
    model: Annotated[str, typer.Option(help="Catalogue name or folder.")] = "nano-deepseek",
    batches: Annotated[list[int] | None, typer.Option("--batch", help="Requests at once.")] = None,
    contexts: Annotated[
        list[int] | None, typer.Option("--context", help="Tokens of a prompt.")
    ] = None,
    max_drafts: Annotated[int, typer.Option(help="The largest K.")] = 3,
    max_fixed: Annotated[
        int | None, typer.Option(help="The largest K that has turns of its own.", min=0)
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time for each load.")] = 60,
    settle: Annotated[
        float,
        typer.Option(help="Seconds of each load, and two runs, for the server to learn it before."),
    ] = 30,
    cycles: Annotated[int, typer.Option(help="Cycles of turns at each load, at least.", min=4)] = 4,
    turn: Annotated[int, typer.Option(help="Steps of a turn.", min=2)] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of a reply.")] = 192,
    plot: Annotated[Path | None, typer.Option(help="Also write an SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure --speculative-adaptive against each fixed K and against no speculation.

    For each context length the batch grows and shrinks again (1, 8, 32, 128, 32, ...). All have
    their turns on the same requests: for 8 steps each fixed K of a server, for 32 its own choice,
    and between two of them another server without speculation, of whose steps those 8 count that
    come to where the turn before has ended. The first twelve steps of a turn do not. A rate is of
    decode steps; prompts are not in it. A step that takes three times what others of its kind do
    counts as three. Steps with the same K emit and take the same, whoever chose it, but for the
    time of choosing: else luck with the text, and with the machine, would be in the rates.

    JSON: `machine`, `commit`, `model`, `max_new_tokens` and `points`, in the order of the run. Each
    has `context`, `batch`, `cycles` in which all had a turn, `mean_context` and `tok_s` of each,
    `own_steps`, of its own choice those that verified 0, 1, ... drafts, `own_over_fixed` (the
    `seconds` and `tokens` of a step of the adaptive server over those of one whose K was always the
    same; near 1), `best`, the fastest but for the adaptive one, `over_best` and `over_plain` (the
    adaptive server's `ratio`, and its 95 % interval by cycles from `low` to `high`), `speedups` of
    K = 0, 1, ... over K = 0 as they were measured and `predicted`, as the adaptive server held them
    at the starts of its turns, on average, and `prediction_errors`, as shares: of the K that it
    held for the `best`, and the `largest`.
    """
    with refusals():
        if plot is not None:
            refuse_unwritable(plot, "--plot")
    folder, sizes = model_folder(model), batches or [1, 8, 32, 128]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    there_and_back = [*sizes, *sizes[-2::-1]]
    loads = [(context, size) for context in contexts or [64, 256, 768] for size in there_and_back]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        # Half as much again: steps reserve slots ahead.
        most = max(batch * context for context, batch in loads)
        room = 3 * (most + max(sizes) * max_new_tokens) // 2
        fixed = max_drafts if max_fixed is None else min(max_fixed, max_drafts)
        turns = start(stack, folder, max_drafts, fixed, turn, room, Path(scratch))
        found = measure(
            turns,
            loads,
            lambda length, seed: contexts_of(tokenizer, length, seed),
            seconds,
            settle,
            cycles,
            max_new_tokens,
        )
        points = [point.to_json() for point in found]
    report = {**taken_on(), "model": model, "max_new_tokens": max_new_tokens, "points": points}
    if plot is not None:
        plot.write_text(draw(report), encoding="utf-8")
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print_table(report)


def print_table(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['model']}, output tokens/s, {report['machine']}")
    names = list(report["points"][0]["tok_s"])
    for column in ("context", "batch", *names, "over best", "over plain", "prediction off"):
        table.add_column(column, justify="right")
    for point in report["points"]:
        errors = point["prediction_errors"]
        table.add_row(
            str(point["context"]),
            str(point["batch"]),
            *(f"{point['tok_s'][name]:.1f}" for name in names),
            *(f"{point[key]['ratio']:.2f}" for key in ("over_best", "over_plain")),
            " / ".join(f"{100 * error:.0f} %" for error in (errors or {}).values()),
        )
    print_whole(table)


if __name__ == "__main__":
    command.run(
        main,
        smoke="--batch 1 --batch 2 --context 16 --seconds 1 --settle 1 --turn 3 --max-drafts 2"
        " --max-new-tokens 128",
    )
