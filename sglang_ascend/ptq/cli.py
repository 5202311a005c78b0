"""`sglang-ascend quantize` and `sglang-ascend evaluate`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_ascend.files import refuse_unwritable
from sglang_ascend.refusals import refusals
from sglang_ascend.tables import print_whole
from sglang_ascend.training.cli import ThreadsOption, use_threads

if TYPE_CHECKING:
    from sglang_ascend.ptq.grid.run import Options
    from sglang_ascend.ptq.solved import Summary
    from sglang_ascend.training.targets.families import Target

FoldersArgument = Annotated[
    list[Path] | None, typer.Argument(help="Checkpoints to judge, each as it would be served.")
]
PromptsOption = Annotated[
    list[Path] | None,
    typer.Option(help="JSON list of {domain, prompt}, repeatable; default is text of its own."),
]
TextsOption = Annotated[
    int, typer.Option(min=1, help="Texts of each domain at most; in all, without --prompts.")
]
GridOption = Annotated[
    Path | None, typer.Option(help="Judge formats x methods instead, into this folder.")
]
CellsOption = Annotated[str, typer.Option(help="With --grid: globs of cells, such as 'int4 *'.")]
IncludeOption = Annotated[str, typer.Option(help="With --grid: a glob of the linears.")]
GridTextsOption = Annotated[
    int, typer.Option("--calibration-texts", min=1, help="With --grid: of each seed.")
]
GridSeedsOption = Annotated[
    int, typer.Option("--calibration-seeds", min=1, help="With --grid: seeds of the texts.")
]

OF_GRID = ("*", "*", 256, 3)  # defaults of --grid's own options


def quantize(
    folder: Annotated[Path, typer.Argument(help="The float checkpoint, with its MTP layer.")],
    recipe: Annotated[
        str,
        typer.Option(help="A recipe below, or a YAML file in ModelSlim's words."),
    ],
    out: Annotated[Path, typer.Option(help="The new folder; it appears when it is complete.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the calibration text.")] = 0,
    calibration_texts: Annotated[
        int, typer.Option(min=1, help="Conversations to calibrate on.")
    ] = 256,
    calibrate: Annotated[
        str, typer.Option(help="Sets and ratios of these, such as code:0.4,own:0.3,zh.jsonl:0.3.")
    ] = "own:1",
    smoothing: Annotated[
        Path | None, typer.Option(help="A folder written before: its scales, not searched anew.")
    ] = None,
    threads: ThreadsOption = 1,
) -> None:
    """Quantize a checkpoint and its MTP layer; serve the result like any other.

    - **w8a8**: int8 weights per channel, int8 inputs per token.
    - **w8a8-flex**: as w8a8, after FlexSmoothQuant.
    - **w8a8-rotated**, **w8a8-rotated-gptq**: inputs and weights rotated first; codes by GPTQ too.
    - **w8a8-mixed**: as w8a8, but inputs stay float where int8 would cost more than FP8 does.
    - **w8a8-head**: and the head.
    - **w8a16**: int8 weights, inputs as they are.
    - **w4a16**: int4 weights in groups of 32 columns, inputs as they are.
    - **w4a8**: experts in int4 by GPTQ, every other linear as in w8a8.
    - **w4a4**: experts and their inputs in int4, the rest as in w8a8, all rotated.
    - **fp8**: E4M3 in blocks of 128x128, inputs in groups of 128: DeepSeek's own format.

    Embedding, norms, routers, the head and the MTP layer's projection stay float, and in all but
    fp8 kv_b_proj too. Where groups do not divide a width, that linear becomes int8 per channel, and
    the command says which. GPTQ calibrates on text of the model's own, or on --calibrate.

    One layer is in memory at a time. A killed run goes on when the same command is given again;
    another recipe's output is never touched. The same command gives the same bytes.

    Example: `sglang-ascend quantize $(sglang-ascend model-path smollm2-mtp) --recipe w8a8 --out q`
    """
    use_threads(threads)
    from tqdm import tqdm

    from sglang_ascend.ptq.quantize import Quantization
    from sglang_ascend.quantization.recipe import read_recipe

    with refusals():
        task = Quantization(
            folder, read_recipe(recipe), out, seed, calibration_texts, calibrate, smoothing
        )
        with tqdm(total=task.num_steps, unit=" layers") as bar:

            def step(name: str) -> None:
                bar.set_postfix_str(name)
                bar.update()

            summary = task.run(step)
        _report(summary, folder, out)
    typer.echo(out)


def evaluate(
    against: Annotated[Path, typer.Option(help="The float checkpoint that they were made from.")],
    folders: FoldersArgument = None,
    prompts: PromptsOption = None,
    texts: TextsOption = 64,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Of each reply to --prompts.")] = 128,
    num_steps: Annotated[int, typer.Option(min=1, max=15, help="Drafts per verify.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the text without --prompts.")] = 1_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also plot the KL into this file.")] = None,
    grid: GridOption = None,
    cells: CellsOption = OF_GRID[0],
    include: IncludeOption = OF_GRID[1],
    calibration_texts: GridTextsOption = OF_GRID[2],
    calibration_seeds: GridSeedsOption = OF_GRID[3],
    threads: ThreadsOption = 1,
) -> None:
    """Say what quantization cost: KL, perplexity, top-1 agreement, acceptance of the MTP layer.

    Every checkpoint reads the same text, which the float one wrote: greedy replies to --prompts, or
    to user turns that it writes itself. KL is that of the next token's distribution to the float
    one's, in nats, over all of the text and over the replies, each also as a ratio to that of the
    checkpoint named last; τ is tokens per verification, "kept" the share of drafts 1, 2 … that are
    accepted where those before were. Intervals are of 95 %, over draws of the texts. Quantized
    linears compute by the operators that serving runs, everything else in float32.

    With --grid no checkpoint is read but --against: its linears are quantized in memory, by every
    method in every format, and judged beside it. The folder gets a page, a plot and JSON; a killed
    run goes on when the same command is given again.

    Example: `sglang-ascend evaluate q --against $(sglang-ascend model-path smollm2-mtp)`
    """
    use_threads(threads)
    with refusals():
        if (grid is None) == (not folders):
            raise ValueError("name checkpoints to judge, or a folder for --grid")
        if grid is not None and (svg is not None or as_json):
            raise ValueError("--grid writes a plot and JSON itself; leave out --svg and --json")
        if grid is None and (cells, include, calibration_texts, calibration_seeds) != OF_GRID:
            raise ValueError(
                "--cells, --include, --calibration-texts and --calibration-seeds are of --grid; "
                "leave them out, or name a folder for it"
            )
        if svg is not None:
            refuse_unwritable(svg, "--svg")
    from sglang_ascend.ptq.grid.run import Options

    given = Options(against, tuple(prompts or ()), texts, max_new_tokens, num_steps, seed)
    if grid is not None:
        words = {"calibration_texts": calibration_texts, "calibration_seeds": calibration_seeds}
        _make_grid(replace(given, include=include, **words), cells, grid)
        return
    report = _judged(folders or [], given)
    _print(report, as_json)
    if svg:
        from sglang_ascend.ptq.report import plot

        with refusals():
            svg.write_text(plot(report), encoding="utf-8")


def _judged(folders: list[Path], given: Options) -> dict[str, Any]:
    """The figures of every checkpoint, on text that the float one writes."""
    from rich.console import Console

    from sglang_ascend.ptq.evaluate import evaluate as measure
    from sglang_ascend.ptq.layers import Layers
    from sglang_ascend.ptq.report import figures
    from sglang_ascend.ptq.weights import Weights
    from sglang_ascend.training.targets.families import Target

    status = Console(stderr=True)
    with refusals(), status.status("the float checkpoint writes the text") as shown:
        target = Target.open(given.against)
        Layers(target, Weights(given.against))
        for folder in folders:  # refused before anything is written
            _refuse_other_vocabulary(Target.open(folder, may_be_quantized=True), target)
        written = given.written_by(target)
        shown.update("scoring")
        return figures(
            measure(
                folders,
                given.against,
                written,
                given.num_steps,
                lambda name: shown.update(f"{name} done"),
            )
        )


def _refuse_other_vocabulary(target: Target, against: Target) -> None:
    """Before text is written; `evaluate` counts the rows of the embedding themselves.

    Raises:
        ValueError: config.json of the two says different numbers.
    """
    sizes = [one.config.fields.get("vocab_size") for one in (target, against)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{target.folder} has a vocabulary of {sizes[0]} and --against {against.folder} one of "
            f"{sizes[1]}; pass the checkpoint that it was made from"
        )


def _make_grid(options: Options, globs: str, out: Path) -> None:
    """The cells' page in `out`, with a bar over the cells."""
    from tqdm import tqdm

    from sglang_ascend.files import alone_in
    from sglang_ascend.ptq.grid.cells import chosen
    from sglang_ascend.ptq.grid.page import write
    from sglang_ascend.ptq.grid.run import Grid

    with refusals():
        grid = Grid(options, chosen(globs), out)
        with (
            alone_in(out, option="--grid"),
            tqdm(total=len(grid.runs), unit=" cells") as bar,
        ):

            def step(name: str) -> None:
                bar.set_postfix_str(name)
                bar.update()

            write(out, options, grid.run(step), grid.sensitivity())
    typer.echo(out / "grid.md")


def _print(report: dict[str, Any], as_json: bool) -> None:
    from sglang_ascend.ptq.report import tables

    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    for table in tables(report):
        print_whole(table)


def _report(summary: Summary, folder: Path, out: Path) -> None:
    """What became of the linears, on stderr."""
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, markup=False)  # globs have brackets
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
    if not summary.has_mtp:
        console.print(
            f"{folder} has no MTP layer, so {out} has none: `sglang-ascend train-mtp` trains one"
        )
    for reason in summary.idle:
        console.print(f"{reason}: this part of the recipe did nothing")
