"""`sglang-ascend quantize` and `sglang-ascend evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_ascend.quantization.cli import refusals

if TYPE_CHECKING:
    from sglang_ascend.ptq.quantize import Summary

ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")]


def quantize(
    folder: Annotated[Path, typer.Argument(help="The float checkpoint, with its MTP layer.")],
    recipe: Annotated[
        str,
        typer.Option(
            help="w8a8, w8a8-mixed, w8a8-head, w8a16, w4a8, fp8, or a YAML file in ModelSlim's "
            "words."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The new folder; it appears when it is complete.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the calibration text.")] = 0,
    calibration_texts: Annotated[
        int, typer.Option(min=1, help="Conversations to calibrate on.")
    ] = 256,
    calibrate: Annotated[
        str, typer.Option(help="Sets and ratios of these, such as code:0.4,own:0.3,zh.jsonl:0.3.")
    ] = "own:1",
    threads: ThreadsOption = 1,
) -> None:
    """Quantize a checkpoint and its MTP layer; serve the result like any other.

    - **w8a8**: int8 weights per channel, int8 inputs per token.
    - **w8a8-mixed**: as w8a8, but inputs stay float where int8 would cost more than FP8 does.
    - **w8a8-head**: and the head, which a tied checkpoint gets as a tensor of its own.
    - **w8a16**: int8 weights, inputs as they are.
    - **w4a8**: experts in int4 by GPTQ, every other linear as in w8a8.
    - **fp8**: E4M3 in blocks of 128x128, inputs in groups of 128: DeepSeek's own format.

    Embedding, norms, routers, the head and the MTP layer's projection stay float, and in all but
    fp8 kv_b_proj too. Where groups do not divide a width, that linear becomes int8 per channel, and
    the command says which. GPTQ calibrates on conversations that the model writes itself, or on
    --calibrate.

    One layer is in memory at a time. A killed run goes on when the same command is given again; an
    output that another recipe wrote is never touched. The same command gives the same bytes.

    Example: `sglang-ascend quantize $(sglang-ascend model-path smollm2-mtp) --recipe w8a8 --out q`
    """
    _use_threads(threads)
    from tqdm import tqdm

    from sglang_ascend.ptq.quantize import Quantization
    from sglang_ascend.quantization.recipe import read_recipe

    with refusals(ValueError):
        task = Quantization(folder, read_recipe(recipe), out, seed, calibration_texts, calibrate)
        with tqdm(total=task.num_steps, unit=" layers") as bar:

            def step(name: str) -> None:
                bar.set_postfix_str(name)
                bar.update()

            summary = task.run(step)
    _report(summary, out)
    typer.echo(out)


def evaluate(
    folders: Annotated[
        list[Path], typer.Argument(help="Checkpoints to judge, each as it would be served.")
    ],
    against: Annotated[Path, typer.Option(help="The float checkpoint that they were made from.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSON list of {domain, prompt}, repeatable; default is text of its own."),
    ] = None,
    texts: Annotated[
        int, typer.Option(min=1, help="Texts of each domain at most; in all, without --prompts.")
    ] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Of each reply to --prompts.")] = 128,
    num_steps: Annotated[int, typer.Option(min=1, max=15, help="Drafts per verify.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the text without --prompts.")] = 1_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also plot the KL into this file.")] = None,
    threads: ThreadsOption = 1,
) -> None:
    """Say what quantization cost: KL, perplexity, top-1 agreement, acceptance of the MTP layer.

    Every checkpoint reads the same text, which the float one wrote: greedy replies to --prompts, or
    to user turns that it writes itself. KL is that of the next token's distribution to the float
    one's, in nats, over all of the text and over the replies, each also as a ratio to that of the
    checkpoint named last; τ is tokens per verification, "kept" the share of drafts 1, 2 … that are
    accepted where those before were. Intervals are of 95 %, over draws of the texts. Quantized
    linears compute by the operators that serving runs, everything else in float32.

    Example: `sglang-ascend evaluate q --against $(sglang-ascend model-path smollm2-mtp)`
    """
    _use_threads(threads)
    from rich.console import Console

    from sglang_ascend.ptq.evaluate import evaluate as measure
    from sglang_ascend.ptq.report import figures, plot, tables
    from sglang_ascend.ptq.text import own_text, replies_to
    from sglang_ascend.training.targets.families import Target

    status = Console(stderr=True)
    with refusals(ValueError), status.status("the float checkpoint writes the text"):
        target = Target.open(against)
        for folder in folders:  # refused before anything is written
            Target.open(folder, may_be_quantized=True)
        if prompts:
            written = replies_to(target, prompts, max_new_tokens, texts)
        else:
            written = own_text(target, seed, texts)
    with refusals(ValueError), status.status("scoring") as shown:
        report = figures(
            measure(folders, against, written, num_steps, lambda name: shown.update(f"{name} done"))
        )
    if svg:
        svg.write_text(plot(report), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    for table in tables(report):
        Console().print(table)


def _report(summary: Summary, out: Path) -> None:
    """What became of the linears, on stderr."""
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True)
    if summary.already_done:
        console.print(f"{out} is this recipe's output already")
    for name, count in summary.schemes.items():
        console.print(f"{name}: {count} linears")
    for reason, names in (
        ("int8 per channel, for groups do not divide their width", summary.fallbacks),
        ("float inputs, for rounding them costs more than max_error", summary.float_inputs),
        ("float, as the recipe asks", summary.left_float),
    ):
        if names:
            console.print(f"{reason}: {len(names)} linears, first {names[0]}")
    for globs in summary.unmatched:
        console.print(f"no linear matches {globs}: this part of the recipe did nothing")


def _use_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
