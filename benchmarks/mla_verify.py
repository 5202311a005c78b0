"""One layer of latent attention on a CUDA GPU beside its roofline; without a GPU it says so."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated

import torch
import typer
from rich.table import Table

from benchmarks import command, flashinfer_mla
from benchmarks.machine import describe_machine, taken_on
from sglang_ascend.ops import attention
from sglang_ascend.tables import print_whole

RANK, ROPE_DIM, PAGE_SIZE = 512, 64, 64
# Device name: bytes/s and dense bf16 FLOP/s of its data sheet (SXM).
PEAKS = {"H100": (3.35e12, 989e12), "H200": (4.8e12, 989e12)}
WARM_UP_RUNS = 20


@dataclass(frozen=True)
class Case:
    """DeepSeek's latent attention in bf16; 16 heads are one rank's of eight."""

    num_heads: int
    query_len: int
    batch: int = 16
    kv_len: int = 8192

    def roofline_seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """The larger of two times: to move keys once, queries and outputs; to multiply."""
        rows = self.batch * self.query_len * self.num_heads
        width = RANK + ROPE_DIM
        moved = 2 * (self.batch * self.kv_len * width + rows * (width + RANK))
        flops = 2 * rows * self.kv_len * (width + RANK)
        return max(moved / bytes_per_second, flops / flops_per_second)


def layers_of(case: Case) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor] | None]:
    """The operator on random tensors and shuffled pages, ready to run; and FlashInfer's."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    width, num_pages = RANK + ROPE_DIM, case.batch * case.kv_len // PAGE_SIZE
    query = draw(case.batch * case.query_len, case.num_heads, width)
    cache = draw(num_pages * PAGE_SIZE, 1, width)
    pages = torch.randperm(num_pages, generator=generator, device="cuda").view(case.batch, -1)
    kv_lens = torch.full((case.batch,), case.kv_len, device="cuda")
    scale = width**-0.5

    def run() -> torch.Tensor:
        return attention.paged_mla(
            query,
            cache,
            pages,
            kv_lens,
            query_len=case.query_len,
            page_size=PAGE_SIZE,
            scale=scale,
            kv_lora_rank=RANK,
        )

    sizes = (case.kv_len, case.query_len, PAGE_SIZE, RANK, scale)
    return run, flashinfer_mla.layer_of(query, cache, pages, *sizes)


def seconds_of_a_layer(run: Callable[[], torch.Tensor], rounds: int) -> float:
    """Median over rounds of a replayed graph of one layer: no launch cost is in it.

    The keys of 16 requests of 8192 tokens are 151 MB, more than the last-level cache holds.
    """
    for _ in range(WARM_UP_RUNS):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure(case: Case, peaks: tuple[float, float], rounds: int) -> dict[str, object]:
    ours, flashinfers = layers_of(case)
    seconds, roofline = seconds_of_a_layer(ours, rounds), case.roofline_seconds(*peaks)
    measured: dict[str, object] = {
        "layer_us": 1e6 * seconds,
        "roofline_us": 1e6 * roofline,
        "roofline_share": roofline / seconds,
    }
    if flashinfers is not None:
        same = flashinfer_mla.agrees(ours(), flashinfers())
        measured["flashinfer_us"] = 1e6 * seconds_of_a_layer(flashinfers, rounds) if same else None
    return asdict(case) | measured


def peaks_of(device_name: str) -> tuple[float, float]:
    for name, peaks in PEAKS.items():
        if name in device_name:
            return peaks
    raise typer.BadParameter(f"no peaks of {device_name} are known: add it to PEAKS.")


def print_table(results: list[dict[str, object]], title: str) -> None:
    table = Table(title=title)
    for column in ("heads", "rows", "batch", "context", "µs", "roofline µs", "share"):
        table.add_column(column, justify="right")
    for row in results:
        sizes = (str(row[name]) for name in ("num_heads", "query_len", "batch", "kv_len"))
        times = (f"{row[name]:.1f}" for name in ("layer_us", "roofline_us"))
        table.add_row(*sizes, *times, f"{row['roofline_share']:.0%}")
    print_whole(table)


def main(
    rounds: Annotated[int, typer.Option(help="Timed runs per case.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure MLA decode (1 row) and verify (2 and 4 rows), 8192 tokens, 16 requests, bf16.

    JSON: `machine`, `commit`, `device`, `cases`; each case has num_heads, query_len, batch, kv_len,
    layer_us, roofline_us (the larger of bytes / bandwidth and FLOP / peak by the data sheet),
    roofline_share and, where FlashInfer is installed, flashinfer_us, null if it computes something
    else. Without a CUDA device: device null, no cases, and exit status 0.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    results = []
    if device is not None:
        peaks = peaks_of(device)
        cases = [Case(*sizes) for sizes in product((16, 128), (1, 2, 4))]
        results = [measure(case, peaks, rounds) for case in cases]
    if as_json:
        report = {**taken_on(), "device": device, "cases": results}
        print(json.dumps(report, indent=1))
    elif device is None:
        print("No CUDA device here: nothing was measured.")
    else:
        print_table(results, f"one latent attention layer, {device}, {describe_machine()}")


if __name__ == "__main__":
    command.run(main, smoke="--rounds 1")
