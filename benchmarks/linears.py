"""The linears of a step on CPU, ours for a few rows beside oneDNN's, alternating in one run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import command
from benchmarks.machine import describe_machine, taken_on
from sglang_ascend.bench.figures.ratios import median_interval
from sglang_ascend.ops.linear import numba, onednn
from sglang_ascend.ops.linear.reference import PreparedWeight
from sglang_ascend.tables import print_whole

# SmolLM2-135M's: (output size, input size) of one layer.
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
NUM_LAYERS = 30
# Ours multiplies float32 weights as wide as they are: those of a bfloat16 checkpoint by half.
# The dtype that has a weight's values, and the one that both operands are in.
WEIGHTS = {
    "bfloat16's values in float32": (torch.bfloat16, torch.float32),
    "float32's values": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
}
Product = Callable[[torch.Tensor, PreparedWeight], torch.Tensor]


def prepared_layers(num_layers: int, values: str) -> list[PreparedWeight]:
    """So many that none is in a cache when its turn comes."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=generator) for size in LAYER * num_layers]
    of_values, of_operands = WEIGHTS[values]
    return [numba.prepare(weight.to(of_values).to(of_operands)) for weight in weights]


def seconds_of(product: Product, x: Sequence[torch.Tensor], layers: list[PreparedWeight]) -> float:
    begun = time.perf_counter()
    for i, weight in enumerate(layers):
        product(x[i % len(LAYER)], weight)
    return time.perf_counter() - begun


def measure(layers: list[PreparedWeight], num_rows: int, rounds: int) -> dict[str, Any]:
    dtype = layers[0].dense.dtype
    x = [torch.randn(num_rows, width).to(dtype) for _, width in LAYER]
    seconds: dict[str, list[float]] = {"ours": [], "onednn": []}
    products: dict[str, Product] = {"ours": numba.linear, "onednn": onednn.linear_packed}
    for number in range(rounds):
        # Whoever goes second may meet a warmer machine: swap the order every round.
        for name in sorted(products, reverse=number % 2 == 1):
            seconds[name].append(seconds_of(products[name], x, layers))
    ratios = [theirs / ours for ours, theirs in zip(*seconds.values(), strict=True)]
    low, high = median_interval(ratios)
    return {
        "rows": num_rows,
        "ours_ms": 1e3 * statistics.median(seconds["ours"]),
        "onednn_ms": 1e3 * statistics.median(seconds["onednn"]),
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
    }


def main(
    rounds: Annotated[int, typer.Option(help="Alternating pairs per case.")] = 15,
    rows: Annotated[list[int], typer.Option(help="Rows of the input.")] = [1, 4, 6, 16, 32, 64],  # noqa: B006
    threads: Annotated[int, typer.Option(help="Threads.")] = 1,
    num_layers: Annotated[int, typer.Option(help="Layers.")] = NUM_LAYERS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure the linears of a step of smollm2's layers: ours for few rows beside oneDNN's packed.

    JSON: `machine`, `commit`, `threads`, `num_layers`, `rounds`, `cases`; each case has `weights`
    (their values, and the dtype of both operands), `rows`, `ours_ms` and `onednn_ms` (median
    milliseconds of all layers), `ratio` (median of onednn / ours over pairs), `ratio_low` and
    `ratio_high` (95 % bootstrap interval).
    """
    torch.set_num_threads(threads)
    console, cases = Console(stderr=True), []
    for values in WEIGHTS:
        layers = prepared_layers(num_layers, values)
        for num_rows in track(rows, values, console=console):
            cases.append({"weights": values, **measure(layers, num_rows, rounds)})
    settings = {"threads": threads, "num_layers": num_layers, "rounds": rounds}
    if as_json:
        print(json.dumps({**taken_on(), **settings, "cases": cases}, indent=1))
    else:
        print_table(cases, f"linears of {num_layers} layers, {describe_machine()}")


def print_table(cases: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for column in ("weights", "rows", "ours ms", "oneDNN ms", "ratio", "95 % interval"):
        table.add_column(column, justify="right")
    for case in cases:
        table.add_row(
            case["weights"],
            str(case["rows"]),
            f"{case['ours_ms']:.1f}",
            f"{case['onednn_ms']:.1f}",
            f"{case['ratio']:.2f}",
            f"{case['ratio_low']:.2f} - {case['ratio_high']:.2f}",
        )
    print_whole(table)


if __name__ == "__main__":
    command.run(main, smoke="--rounds 1 --rows 1 --num-layers 2")
