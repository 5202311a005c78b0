"""Top-k and top-p of a row of logits: ours beside a sort, alternating in one run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import command
from benchmarks.machine import describe_machine, taken_on
from sglang_ascend.bench.figures.ratios import median_interval
from sglang_ascend.ops import sampling
from sglang_ascend.tables import print_whole

ALL = 1 << 30
FILTERS = [(1, 1.0), (20, 1.0), (50, 0.95), (64, 0.9), (1024, 0.95), (ALL, 0.95), (ALL, 1.0)]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BAR = 2.0  # on CPU
CANDIDATES = {
    "sampling.top_k_top_p": "the sort of SGLang's sequential filters, and npu_top_k_top_p"
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


@dataclass(frozen=True)
class Case:
    top_k: int
    top_p: float
    rows: int
    vocab_size: int
    dtype: str


def sorted_threshold(
    logits: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor
) -> torch.Tensor:
    """Sort, cumulate, mask: what engines do without a kernel, short of scattering it back."""
    values = logits.sort(dim=-1).values
    kth = values.gather(1, (values.shape[1] - top_ks.long().clamp(max=values.shape[1]))[:, None])
    values.masked_fill_(values < kth, -torch.inf)
    mass = values.float().softmax(dim=-1).cumsum(dim=-1)
    dropped = mass <= 1 - top_ps[:, None]
    dropped[:, -1] = False
    return values.masked_fill_(dropped, torch.inf).amin(dim=-1)


def flashinfers_draw() -> Callable[..., torch.Tensor] | None:
    if not find_spec("flashinfer"):
        return None
    from flashinfer.sampling import top_k_top_p_sampling_from_logits

    return top_k_top_p_sampling_from_logits


def contenders(case: Case, device: str) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(case.rows, case.vocab_size, generator=generator)
    logits = logits.to(device, DTYPES[case.dtype])
    top_ks = torch.full((case.rows,), case.top_k, dtype=torch.int32, device=device)
    top_ps = torch.full((case.rows,), case.top_p, device=device)
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: sampling.top_k_top_p(logits, top_ks, top_ps),
        "sort": lambda: sorted_threshold(logits, top_ks, top_ps),
    }
    if logits.dtype == torch.float32:  # as the server's are
        parameters = torch.ones_like(top_ps)[:, None], top_ks, top_ps, torch.zeros_like(top_ps)
        definition = sampling.filter_probs.implementation("reference")
        runs["probs"] = lambda: sampling.filter_probs(logits, *parameters)
        runs["probs_sort"] = lambda: definition(logits, *parameters)
    if device == "cuda":
        target = torch.empty_like(logits)
        runs["copy"] = lambda: target.copy_(logits)
        if draw := flashinfers_draw():
            runs["flashinfer"] = lambda: draw(
                logits, top_ks, top_ps, filter_apply_order="top_k_first"
            )
    return runs


def seconds(run: Callable[[], object], device: str, clock: Callable[[], float]) -> float:
    calls = 20 if device == "cuda" else 1
    start = clock()
    for _ in range(calls):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / calls


def measure(case: Case, device: str, rounds: int, clock: Callable[[], float]) -> dict[str, object]:
    """Median microseconds per row of each, and sort / ours of each round."""
    runs = contenders(case, device)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-1, rounds):  # the first is compilation
        # Whoever goes second may meet a warmer machine: swap the order every round.
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            elapsed = seconds(runs[name], device, clock)
            if number >= 0:
                times[name].append(1e6 * elapsed / case.rows)
    ratios = [theirs / mine for mine, theirs in zip(times["ours"], times["sort"], strict=True)]
    low, high = median_interval(ratios)
    return {
        **asdict(case),
        **{f"{name}_us": statistics.median(values) for name, values in times.items()},
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "bar": BAR if device == "cpu" else None,
    }


def print_table(results: list[dict], title: str) -> None:
    table = Table(title=title)
    timed = [name for name in results[0] if name.endswith("_us")]
    for column in ("top_k", "top_p", *timed, "sort / ours", "95 % interval", "bar"):
        table.add_column(column.removesuffix("_us"), justify="right")
    for row in results:
        table.add_row(
            "all" if row["top_k"] == ALL else str(row["top_k"]),
            str(row["top_p"]),
            *(f"{row[name]:.0f}" for name in timed),
            f"{row['ratio']:.1f}",
            f"{row['ratio_low']:.1f} - {row['ratio_high']:.1f}",
            "-" if row["bar"] is None else f"{row['bar']:.1f}",
        )
    print_whole(table)


def main(
    rounds: Annotated[int, typer.Option(help="Alternating rounds per case.")] = 15,
    rows: Annotated[int, typer.Option(help="Rows of logits, such as requests times (K+1).")] = 4,
    vocab_size: Annotated[int, typer.Option(help="Logits per row.")] = 129280,
    dtype: Annotated[str, typer.Option(help="Of the logits: fp32, fp16 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu, on one thread; or cuda.")] = "cpu",
    clock: Annotated[
        str, typer.Option(help="wall, or cpu: the calling thread's own time, for a busy machine.")
    ] = "wall",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure the threshold of top-k, then top-p: ours beside sort, cumulative sum and mask.

    Logits are normal with deviation 3. JSON: {machine, commit, device, clock, rounds, cases}; each
    case has top_k (2^30: none), top_p, rows, vocab_size and dtype; ours_us and sort_us, in fp32
    also probs_us and probs_sort_us (what the server draws from, and its definition), on cuda also
    copy_us (of the logits) and, where it is installed, flashinfer_us (a draw), median microseconds
    per row; ratio (median of sort / ours over rounds), ratio_low and ratio_high (95 % bootstrap
    interval) and bar (the ratio asked for, or null).

    Example: python -m benchmarks.top_k_top_p --rows 32 --json > top_k_top_p.json
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype {dtype} is unknown: choose {', '.join(DTYPES)}.")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"--device {device} is not on this machine: choose cpu.")
    if clock not in CLOCKS or (clock == "cpu" and device != "cpu"):
        raise typer.BadParameter(f"--clock {clock} is unknown on {device}: choose wall.")
    torch.set_num_threads(1)
    cases = [Case(top_k, top_p, rows, vocab_size, dtype) for top_k, top_p in FILTERS]
    console = Console(stderr=True)
    results = [
        measure(case, device, rounds, CLOCKS[clock])
        for case in track(cases, "filters", console=console)
    ]
    machine = describe_machine() if device == "cpu" else torch.cuda.get_device_name()
    if as_json:
        report = {
            **taken_on(),
            "machine": machine,
            "device": device,
            "clock": clock,
            "rounds": rounds,
        }
        print(json.dumps({**report, "cases": results}, indent=1))
        return
    title = f"{clock} microseconds per row of {vocab_size} {dtype} logits, {rows} rows, {machine}"
    print_table(results, title)


if __name__ == "__main__":
    command.run(main, smoke="--rounds 1 --rows 1 --vocab-size 1000")
