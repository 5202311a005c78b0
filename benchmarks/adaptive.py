"""A server that chooses K by itself against each fixed K and no speculation, load by load."""

from __future__ import annotations

import json
import os
import random
import statistics
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
from benchmarks.machine import taken_on
from benchmarks.server import ServerProcess, starting_server
from sglang_ascend.bench.figures.ratios import spread
from sglang_ascend.bench.options import model_folder
from sglang_ascend.bench.rounds import TASKS, alternate, read_tasks
from sglang_ascend.svg import INK, MTP, OTHERS, document, line, text

PARTS = Path(__file__).parent / "server_parts"
PLAIN, ADAPTIVE = "plain", "adaptive"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 340, 50, 90, 50, 60
console = Console(stderr=True)


@dataclass(frozen=True)
class Way:
    """One of the servers, told how many drafts to make if it can be told."""

    server: ServerProcess
    drafts: Path | None = None
    told: str = ""

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int) -> tuple[float, float]:
        """(output tokens/s behind the prompts, prompts included)."""
        if self.drafts is not None:
            self.drafts.write_text(self.told)
        self._post("flush_cache?timeout=30")
        begun = time.perf_counter()
        first = self._until_one_ends(prompts, 1)
        prefilled = time.perf_counter()
        # Of the prompts all but the last token is cached now.
        behind = self._until_one_ends(prompts, max_new_tokens)
        ended = time.perf_counter()
        return behind / (ended - prefilled), (first + behind) / (ended - begun)

    def _until_one_ends(self, prompts: Sequence[list[int]], max_new_tokens: int) -> int:
        """Emits tokens for all `prompts`, and returns how many.

        The first reply to end ends the others, so that the batch is full all the time: what a
        server does with few requests left is another batch's figure.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}

        def emitted(prompt: list[int]) -> int:
            reply: Any = self.server.generate(input_ids=prompt, sampling_params=sampling)
            return reply["meta_info"]["completion_tokens"]

        with ThreadPoolExecutor(len(prompts)) as pool:
            replies = [pool.submit(emitted, prompt) for prompt in prompts]
            if max_new_tokens > 1:
                wait(replies, return_when=FIRST_COMPLETED)
                self._post("abort_request", json={"abort_all": True})
            return sum(reply.result() for reply in replies)

    def _post(self, what: str, **body: Any) -> None:
        requests.post(f"{self.server.url}/{what}", timeout=60, **body).raise_for_status()

    def predicted(self) -> list[float] | None:
        """S(B,0), S(B,1), ... as the server that chooses has learnt it, at its last steps."""
        assert self.drafts is not None
        path = self.drafts.with_suffix(".predicted")
        return json.loads(path.read_text()) if path.exists() else None


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


@dataclass(frozen=True)
class Point:
    """One load, on every server: of each round the rates behind the prompts, and with them."""

    context: int
    batch: int
    rounds: list[dict[str, tuple[float, float]]]
    predicted: list[float] | None

    def rate(self, name: str) -> float:
        return statistics.median(one[name][0] for one in self.rounds)

    def over(self, other: str, which: int = 0) -> dict[str, float]:
        """Of the server that chooses over another one, round by round."""
        return spread([one[ADAPTIVE][which] / one[other][which] for one in self.rounds])

    def over_best(self) -> dict[str, float]:
        """Over the fastest of the others, which is chosen for each round by the other rounds: by
        all of them it would be the luckiest one."""
        names = [name for name in self.rounds[0] if name != ADAPTIVE]
        ratios = []
        for i, one in enumerate(self.rounds):
            others = [*self.rounds[:i], *self.rounds[i + 1 :]] or self.rounds
            best = max(names, key=lambda name: statistics.median(r[name][0] for r in others))
            ratios.append(one[ADAPTIVE][0] / one[best][0])
        return spread(ratios)

    def to_json(self) -> dict[str, Any]:
        fixed = [name for name in self.rounds[0] if name not in (PLAIN, ADAPTIVE)]
        best = max([PLAIN, *fixed], key=self.rate)
        measured = [self.rate(name) / self.rate(fixed[0]) for name in fixed]
        errors = [p / m - 1 for p, m in zip(self.predicted or [], measured, strict=False)]
        return {
            "context": self.context,
            "batch": self.batch,
            "tok_s": {name: self.rate(name) for name in self.rounds[0]},
            "best": best,
            "over_best": self.over_best(),
            "over_plain": self.over(PLAIN),
            "with_prompts_over_plain": self.over(PLAIN, which=1),
            "speedups": measured,
            "predicted": self.predicted,
            "prediction_error": max(map(abs, errors)) if errors else None,
            "rounds": self.rounds,
        }


def measure(
    ways: dict[str, Way], loads: list[tuple[int, int]], make_prompts: Any, rounds: int, tokens: int
) -> Iterator[Point]:
    """Each load after one round to settle in, which is not counted."""
    for seed, (context, batch) in enumerate(track(loads, "loads", console=console)):
        source = make_prompts(context, seed)
        groups = [[next(source) for _ in range(batch)] for _ in range(rounds)]
        found = list(alternate(ways, lambda way, group: way.run(group, tokens), groups))
        point = Point(context, batch, found, ways[ADAPTIVE].predicted())
        rates = ", ".join(f"{name} {point.rate(name):.1f}" for name in ways)
        console.print(f"context {context}, batch {batch}, tokens/s: {rates}")
        yield point


def start(stack: ExitStack, folder: Path, max_drafts: int, scratch: Path) -> dict[str, Way]:
    """Two processes: one without speculation, and one for every K and for its own choice."""
    drafts = scratch / "drafts"
    drafts.write_text("")
    # The servers share the cores: one that is not asked must not spin.
    common = ("--model-path", str(folder), "--sleep-on-idle", "--max-running-requests", "128")
    mtp = ("--speculative-algorithm", "MTP", "--speculative-num-steps", str(max_drafts))
    environment = {
        "PYTHONPATH": os.pathsep.join([str(PARTS), *os.environ.get("PYTHONPATH", "").split()]),
        "BENCHMARK_PARTS": "fixed_drafts",
        "FIXED_DRAFTS": str(drafts),
    }
    plain = stack.enter_context(starting_server(*common))
    ours = starting_server(*common, *mtp, "--speculative-adaptive", **environment)
    server = stack.enter_context(ours)
    for one in (plain, server):
        one.wait_until_ready()
    fixed = {f"K = {k}": Way(server, drafts, str(k)) for k in range(max_drafts + 1)}
    return {PLAIN: Way(plain), **fixed, ADAPTIVE: Way(server, drafts)}


def main(
    model: Annotated[str, typer.Option(help="Catalogue name or folder.")] = "nano-deepseek",
    batches: Annotated[list[int] | None, typer.Option("--batch", help="Requests at once.")] = None,
    contexts: Annotated[
        list[int] | None, typer.Option("--context", help="Tokens of a prompt.")
    ] = None,
    max_drafts: Annotated[int, typer.Option(help="The largest K.")] = 3,
    rounds: Annotated[int, typer.Option(help="Alternating rounds of a load.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of a reply.")] = 192,
    plot: Annotated[Path | None, typer.Option(help="Also write an SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure --speculative-adaptive against each fixed K and against no speculation.

    For each context length the batch grows and shrinks again (1, 4, 8, 32, 64, 32, ...). A rate is
    of the tokens behind the prompts, which are cached by then, until the first reply has its
    tokens; `with_prompts_` counts both.

    JSON: `machine`, `commit`, `model`, `max_new_tokens` and `points`, in the order of the run. Each
    has `context`, `batch`, `tok_s` of every server (medians over rounds), `best`, the fastest but
    for the adaptive one, `over_best`, `over_plain` and `with_prompts_over_plain` (the adaptive
    server's ratio: `median` of the rounds', `low` and `high`, 95 %), `speedups` of K = 0, 1, ...
    over K = 0 as they were measured and `predicted`, as the adaptive server held them,
    `prediction_error` (the largest, as a share), and `rounds`.
    """
    folder, sizes = model_folder(model), batches or [1, 4, 8, 32, 64]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    there_and_back = [*sizes, *sizes[-2::-1]]
    loads = [(context, size) for context in contexts or [64, 256, 768] for size in there_and_back]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        ways = start(stack, folder, max_drafts, Path(scratch))
        found = measure(
            ways,
            loads,
            lambda length, seed: contexts_of(tokenizer, length, seed),
            rounds,
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
        error = point["prediction_error"]
        table.add_row(
            str(point["context"]),
            str(point["batch"]),
            *(f"{point['tok_s'][name]:.1f}" for name in names),
            *(f"{point[key]['median']:.2f}" for key in ("over_best", "over_plain")),
            "" if error is None else f"{100 * error:.0f} %",
        )
    Console().print(table)


def draw(report: dict[str, Any]) -> str:
    """An SVG: tokens/s over those without speculation, of every K and of the server's choice."""
    points = report["points"]
    names = list(points[0]["tok_s"])
    ratios = {
        name: [point["tok_s"][name] / point["tok_s"][PLAIN] for point in points] for name in names
    }
    highest = 1.05 * max(max(values) for values in ratios.values())
    step = (WIDTH - LEFT - RIGHT) / max(1, len(points) - 1)
    room = HEIGHT - TOP - BOTTOM
    colors = {PLAIN: INK, ADAPTIVE: MTP} | dict(zip(names[1:-1], OTHERS, strict=False))
    title = f"tokens/s over those without speculation, {report['model']}, {report['machine']}"
    parts = [text(LEFT, 24, title, 'font-weight="bold"')]
    for name, values in ratios.items():
        places = [
            (LEFT + i * step, TOP + room * (1 - value / highest)) for i, value in enumerate(values)
        ]
        parts.append(line(places, colors[name]))
        parts.append(text(places[-1][0] + 6, places[-1][1] + 4, name, color=colors[name]))
        if name == ADAPTIVE:
            parts += [f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="{MTP}"/>' for x, y in places]
    for i, point in enumerate(points):
        middle = 'text-anchor="middle"'
        parts.append(text(LEFT + i * step, HEIGHT - 38, str(point["batch"]), middle))
        parts.append(text(LEFT + i * step, HEIGHT - 20, str(point["context"]), middle))
    parts += [text(4, HEIGHT - 38, "batch"), text(4, HEIGHT - 20, "context")]
    return document(WIDTH, HEIGHT, title, parts)


if __name__ == "__main__":
    command.run(
        main,
        smoke="--batch 1 --batch 2 --context 16 --rounds 1 --max-new-tokens 12 --max-drafts 2",
    )
