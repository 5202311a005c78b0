"""Which loss trains the better drafts: a new MTP layer by each, on the same tokens and seeds."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import command
from benchmarks.machine import taken_on
from sglang_ascend.bench.figures.lookup import accepted_counts
from sglang_ascend.bench.figures.ratios import DRAWS, middle
from sglang_ascend.bench.options import model_folder
from sglang_ascend.bench.rounds import TASKS
from sglang_ascend.files import refuse_unwritable, write_json
from sglang_ascend.refusals import refusals
from sglang_ascend.svg import MTP, PLAIN, Panel, document
from sglang_ascend.tables import print_whole
from sglang_ascend.training.acceptance import Output, draft_matches, is_looping
from sglang_ascend.training.generation.generate import generate_shards
from sglang_ascend.training.generation.generator import GenerateConfig
from sglang_ascend.training.generation.outputs import greedy_outputs, load_outputs, save_outputs
from sglang_ascend.training.generation.prompt_files import read_prompts
from sglang_ascend.training.generation.prompts import prompt_key
from sglang_ascend.training.loss import LOSSES, LossConfig
from sglang_ascend.training.provenance import digest, last_losses, read_json
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import started_layer, trained_layer
from sglang_ascend.training.trainer import TrainConfig, Trainer

console = Console(stderr=True)
# Of one reply: drafts that were kept, and forwards of the target.
Kept = tuple[int, int]


def kept_drafts(target: Target, run: Path, outputs: Sequence[Output], num_steps: int) -> list[Kept]:
    """By the layer that lies in `run`, greedily verified."""
    layer = trained_layer(target, run)
    embedding, head = target.embedding_and_head()
    kept = []
    for output in outputs:
        matches = draft_matches(layer, output, embedding, head, num_steps)
        counts = accepted_counts(matches, output.prompt_length)
        kept.append((sum(counts), len(counts)))
    return kept


def length(rows: Sequence[Kept]) -> float:
    """Tokens per forward."""
    return 1 + sum(kept for kept, _ in rows) / max(1, sum(forwards for _, forwards in rows))


def compared(kept: dict[str, list[list[Kept]]], reference: str) -> dict[str, dict[str, Any]]:
    """Acceptance length of each loss and what it has over `reference`, with 95 % intervals.

    A draw takes seeds and replies with replacement, the same ones for every loss.

    Args:
        kept: by loss a list of replies for each seed.
    """
    seeds, replies = len(kept[reference]), len(kept[reference][0])
    rng = random.Random(0)

    def lengths(chosen_seeds: Sequence[int], chosen: Sequence[int]) -> dict[str, float]:
        return {
            name: statistics.fmean(length([rows[s][i] for i in chosen]) for s in chosen_seeds)
            for name, rows in kept.items()
        }

    whole = lengths(range(seeds), range(replies))
    draws = [
        lengths(rng.choices(range(seeds), k=seeds), rng.choices(range(replies), k=replies))
        for _ in range(DRAWS)
    ]

    def interval(value: Callable[[dict[str, float]], float]) -> dict[str, float]:
        low, high = middle(map(value, draws))
        return {"low": low, "high": high}

    return {
        name: {
            "accept_length": whole[name],
            **interval(lambda draw, name=name: draw[name]),
            "by_seed": [length(rows) for rows in kept[name]],
            "over_reference": {
                "difference": whole[name] - whole[reference],
                **interval(lambda draw, name=name: draw[name] - draw[reference]),
            },
        }
        for name in kept
    }


def prepared(
    target: Target, work: Path, prompts: Path, tokens: int, max_new_tokens: int, dtype: str
) -> tuple[Path, list[Output]]:
    """Shards to train on, and the target's replies to what was held out, loops left out."""
    held_out = read_prompts(prompts)
    data, replies = work / "data", work / "held-out.safetensors"
    excluded = {prompt_key(row["prompt"]) for row in held_out}
    config = GenerateConfig(dtype=dtype, max_reply_tokens=max_new_tokens)
    generate_shards(target, data, config, excluded, tokens)
    if not replies.exists():
        save_outputs(replies, greedy_outputs(target, held_out, max_new_tokens))
    outputs = [output for output in load_outputs(replies) if not is_looping(output)]
    return data, outputs


def bind(work: Path, asked: dict[str, object]) -> None:
    """What lies in `work` is compared, so all of it is by the same options."""
    path = work / "options.json"
    before = read_json(path) if path.exists() else asked
    for name, value in asked.items():
        if before.get(name) != value:
            raise SystemExit(
                f"{name} is {value} and was {before.get(name)} in {work}: keep it as it was, or "
                "name another folder."
            )
    work.mkdir(parents=True, exist_ok=True)
    write_json(path, asked)


def train(target: Target, data: Path, out: Path, config: TrainConfig, loss: LossConfig) -> None:
    """Goes on where it was killed; nothing to do where it ended."""
    layer = started_layer(target, data, out, config.seed, from_scratch=True)
    Trainer(layer, *target.embedding_and_head(), data, out, config, loss).run()


def main(
    work: Annotated[Path, typer.Argument(help="Folder of data and trainings; resumed.")],
    model: Annotated[str, typer.Option(help="Catalogue name or folder.")] = "nano-deepseek",
    prompts: Annotated[Path, typer.Option(help="Held-out prompts: {domain, prompt}.")] = TASKS,
    losses: Annotated[list[str] | None, typer.Option("--loss", help="Default: all.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Layers by each loss.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each.")] = 300,
    tokens: Annotated[int, typer.Option(min=1, help="The target writes to learn from.")] = 200_000,
    tokens_per_batch: Annotated[int, typer.Option(min=64, help="Padded tokens.")] = 2048,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens of a reply.")] = 96,
    num_steps: Annotated[int, typer.Option(min=1, max=15, help="Drafts K.")] = 3,
    dtype: Annotated[str, typer.Option(help="Of the products: float32, bfloat16.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Also write an SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Train a new layer by each loss on the same shards and compare what is kept of its drafts.

    A seed decides the layer's start and the order of the batches, which are the same for every
    loss. Trainings lie in WORK/LOSS-SEED: a killed run goes on.

    JSON: `machine`, `commit`, `model`, `num_steps`, `steps`, `trained_tokens` (of one training),
    `replies` (held out, without loops), `reference` and `losses`: of each `accept_length`, the mean
    over seeds, with `low` and `high` (95 %, bootstrap over seeds and replies), `by_seed`, and
    `over_reference`, its `difference` to the reference's with `low` and `high`, paired.
    """
    with refusals():
        if plot is not None:
            refuse_unwritable(plot, "--plot")
    torch.set_num_threads(threads)
    target, names = Target.open(model_folder(model)), losses or list(LOSSES)
    asked = {
        "--model": str(target.folder.resolve()),
        "--prompts": digest(read_prompts(prompts)),
        "--steps": steps,
        "--tokens": tokens,
        "--tokens-per-batch": tokens_per_batch,
        "--max-new-tokens": max_new_tokens,
        "--num-steps": num_steps,
        "--dtype": dtype,
    }
    bind(work, asked)
    data, outputs = prepared(target, work, prompts, tokens, max_new_tokens, dtype)
    runs = [(name, seed) for seed in range(seeds) for name in names]
    kept: dict[str, list[list[Kept]]] = {name: [] for name in names}
    for name, seed in track(runs, "trainings", console=console):
        out = work / f"{name}-{seed}"
        config = TrainConfig(steps, tokens_per_batch, seed=seed, dtype=dtype)
        train(target, data, out, config, LossConfig(num_steps=num_steps, kind=name))
        kept[name].append(kept_drafts(target, out, outputs, num_steps))
        console.print(f"{name}, seed {seed}: {length(kept[name][-1]):.3f} tokens per forward")
    report = {
        **taken_on(),
        "model": model,
        "num_steps": num_steps,
        "steps": steps,
        "trained_tokens": last_losses(work / f"{names[0]}-0" / "log.jsonl")["trained_tokens"],
        "replies": len(outputs),
        "reference": names[0],
        "losses": compared(kept, names[0]),
    }
    if plot is not None:
        plot.write_text(draw(report), encoding="utf-8")
    print(json.dumps(report, indent=1)) if as_json else print_table(report)


def print_table(report: dict[str, Any]) -> None:
    of = f"{report['trained_tokens']:,} trained tokens, {report['replies']} replies"
    table = Table(title=f"{report['model']}, {of}")
    for column in ("loss", "tokens/forward", f"over {report['reference']}", "by seed"):
        table.add_column(column, justify="right")
    for name, row in report["losses"].items():
        over = row["over_reference"]
        table.add_row(
            name,
            f"{row['accept_length']:.3f} ({row['low']:.2f} - {row['high']:.2f})",
            f"{over['difference']:+.3f} ({over['low']:+.3f} - {over['high']:+.3f})",
            " ".join(f"{value:.3f}" for value in row["by_seed"]),
        )
    print_whole(table)


def draw(report: dict[str, Any]) -> str:
    """A bar for each loss, the reference's grey, and one for each of its seeds."""
    title = f"tokens per forward of {report['model']} by loss, K = {report['num_steps']}"
    groups = [
        (name, [(value, PLAIN if name == report["reference"] else MTP) for value in row["by_seed"]])
        for name, row in report["losses"].items()
    ]
    return document(800, 300, title, Panel(40, 10, 720, 280).bars(title, groups, "{:.2f}"))


if __name__ == "__main__":
    command.run(
        main,
        "--loss kl --loss ce --seeds 2 --steps 2 --tokens 300 --tokens-per-batch 512 "
        "--max-new-tokens 8",
    )
