"""Our CPU attention backend beside SGLang's stock ``torch_native``, alternating in one run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from benchmarks import command
from benchmarks.machine import describe_machine, taken_on
from sglang_ascend.attention.metadata import (
    StepMetadata,
    gqa_attention,
    mla_attention,
    slot_table,
)
from sglang_ascend.bench.figures.ratios import median_interval
from sglang_ascend.tables import print_whole

# SmolLM2-135M's depth: metadata is built once per step and shared by this many layers.
NUM_LAYERS = 30
MAX_CONTEXT_LEN = 1024
# Tokens that each request decoded in step with the others; the rest is its prompt, in one run.
NUM_DECODED = 64
BARS = {1: 1.0, 32: 3.0}
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


@dataclass(frozen=True)
class Shape:
    """One attention layer; ``kv_lora_rank`` 0 means grouped heads with a value cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_lora_rank: int = 0


SHAPES = {"smollm2": Shape(9, 3, 64), "nano-mla": Shape(6, 1, 112, kv_lora_rank=80)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """Decode has one query row per request, verify has num_draft_tokens = 4."""

    shape: str
    phase: Literal["decode", "verify"]
    batch: int
    lengths: Literal["ragged", "uniform"]
    dtype: str
    threads: int

    @property
    def query_len(self) -> int:
        return 1 if self.phase == "decode" else 4


class Step:
    """The tensors of one case and the two ways to run its layers."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)
        self.case, self.shape = case, SHAPES[case.shape]
        if case.lengths == "uniform":
            self.kv_lens = torch.full((case.batch,), 512)
        else:
            spread = torch.linspace(64, MAX_CONTEXT_LEN, 2 * case.batch + 1).long()
            shuffled = torch.randperm(case.batch, generator=generator)
            self.kv_lens = spread[1::2][shuffled]
        self.req_pool_indices = torch.arange(case.batch)
        self.req_to_token = served_slots(self.kv_lens)
        self.scale = self.shape.head_dim**-0.5
        # Enough layers that one layer's pages are no longer in the cache when its turn comes.
        num_caches = max(3, min(NUM_LAYERS, 128 // case.batch))
        num_slots, dtype = int(self.kv_lens.sum()), DTYPES[case.dtype]

        def draw(rows: int, heads: int) -> torch.Tensor:
            values = torch.randn(rows, heads, self.shape.head_dim, generator=generator)
            return values.to(dtype)

        self.query = draw(case.batch * case.query_len, self.shape.num_heads)
        self.caches = []
        for _ in range(num_caches):
            keys = draw(num_slots, self.shape.num_kv_heads)
            rank = self.shape.kv_lora_rank
            values = keys[..., :rank] if rank else draw(num_slots, self.shape.num_kv_heads)
            self.caches.append((keys, values))
        self.native = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
        self.metadata = self.build_metadata()

    def build_metadata(self) -> StepMetadata:
        """What the backend does once per forward."""
        return StepMetadata(
            block_table=slot_table(
                self.req_to_token, self.req_pool_indices, self.kv_lens, int(self.kv_lens.max())
            ),
            kv_lens=self.kv_lens,
            page_size=1,
            query_len=self.case.query_len,
        )

    def run_ours(self, layer: int) -> torch.Tensor:
        keys, values = self.caches[layer]
        if rank := self.shape.kv_lora_rank:
            return mla_attention(self.metadata, self.query, keys, self.scale, rank)
        return gqa_attention(self.metadata, self.query, keys, values, self.scale)

    def run_native(self, layer: int) -> torch.Tensor:
        """torch_native has no verify: its extend over the same rows stands in for it."""
        keys, values = self.caches[layer]
        output = self.query.new_empty(*self.query.shape[:2], values.shape[-1])
        tensors = (self.query, output, keys, values)
        requests = (self.req_to_token, self.req_pool_indices, self.kv_lens)
        options = {"scaling": self.scale, "enable_gqa": True}
        if self.case.phase == "decode":
            return self.native._run_sdpa_forward_decode(*tensors, *requests, **options)
        query_lens = torch.full_like(self.kv_lens, self.case.query_len)
        prefix_lens = self.kv_lens - query_lens
        return self.native._run_sdpa_forward_extend(
            *tensors, *requests, prefix_lens, query_lens, causal=True, **options
        )


def served_slots(kv_lens: torch.Tensor) -> torch.Tensor:
    """req_to_token as a server leaves it: prompts in runs, decoded tokens interleaved."""
    table = torch.zeros(len(kv_lens), MAX_CONTEXT_LEN, dtype=torch.int32)
    decoded_start = int((kv_lens - NUM_DECODED).clamp(min=0).sum())
    prompt_start = 0
    for request, kv_len in enumerate(kv_lens.tolist()):
        prompt_len = max(0, kv_len - NUM_DECODED)
        table[request, :prompt_len] = torch.arange(prompt_start, prompt_start + prompt_len)
        steps = torch.arange(kv_len - prompt_len)
        table[request, prompt_len:kv_len] = decoded_start + request + steps * len(kv_lens)
        prompt_start += prompt_len
    return table


def measure(case: Case, rounds: int, clock: Callable[[], float]) -> dict[str, object]:
    """Seconds per layer of both, and the ratio of each round of alternating runs."""
    torch.set_num_threads(case.threads)
    step = Step(case)
    difference = (step.run_ours(0).float() - step.run_native(0).float()).abs().max().item()
    num_caches = len(step.caches)

    def seconds_per_layer(run: Callable[[int], torch.Tensor]) -> float:
        start = clock()
        for layer in range(num_caches):
            run(layer)
        return (clock() - start) / num_caches

    def metadata_seconds() -> float:
        start = clock()
        step.build_metadata()
        return clock() - start

    ours, native, metadata = [], [], []
    for number in range(rounds):
        # Whoever goes second may meet a warmer machine: swap the order every round.
        for backend in ("ours", "native") if number % 2 == 0 else ("native", "ours"):
            if backend == "native":
                native.append(seconds_per_layer(step.run_native))
                continue
            metadata.append(metadata_seconds())
            ours.append(seconds_per_layer(step.run_ours) + metadata[-1] / NUM_LAYERS)
    ratios = [theirs / mine for mine, theirs in zip(ours, native, strict=True)]
    low, high = median_interval(ratios)
    return asdict(case) | {
        "ours_us": 1e6 * statistics.median(ours),
        "native_us": 1e6 * statistics.median(native),
        "metadata_us": 1e6 * statistics.median(metadata) / NUM_LAYERS,
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "bar": BARS.get(case.batch),
        "max_difference": difference,
    }


def all_cases(threads: list[int]) -> list[Case]:
    phases = [("decode", 1), ("decode", 8), ("decode", 32), ("verify", 1), ("verify", 32)]
    return [
        Case(shape, phase, batch, lengths, dtype, count)
        for count, dtype, shape, lengths, (phase, batch) in product(
            threads, DTYPES, SHAPES, ("ragged", "uniform"), phases
        )
        # One request has no spread of lengths; its ragged case is the middle one, 544.
        if not (batch == 1 and lengths == "uniform")
    ]


def print_table(results: list[dict], title: str) -> None:
    table = Table(title=title)
    for column in ("shape", "phase", "lengths", "dtype"):
        table.add_column(column)
    for column in ("batch", "threads", "ours µs", "native µs", "ratio", "95 % interval", "bar"):
        table.add_column(column, justify="right")
    for row in results:
        table.add_row(
            *(str(row[name]) for name in ("shape", "phase", "lengths", "dtype", "batch")),
            str(row["threads"]),
            f"{row['ours_us']:.0f}",
            f"{row['native_us']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_low']:.2f} - {row['ratio_high']:.2f}",
            "-" if row["bar"] is None else f"{row['bar']:.1f}",
        )
    print_whole(table)


def main(
    rounds: Annotated[int, typer.Option(help="Alternating pairs per case.")] = 15,
    threads: Annotated[list[int], typer.Option(help="Threads; may be given twice.")] = [1],  # noqa: B006
    batches: Annotated[list[int], typer.Option("--batch", help="Requests.")] = [1, 8, 32],  # noqa: B006
    only: Annotated[
        str, typer.Option(help='Words that a case must have, as in "decode smollm2 bf16".')
    ] = "",
    clock: Annotated[
        str, typer.Option(help="wall, or cpu: the calling thread's own time (1 thread only).")
    ] = "wall",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure one attention layer of decode and verify: ours beside SGLang's torch_native.

    JSON: `machine`, `commit`, `clock`, `rounds`, `cases`; each case has `shape`, `phase`, `batch`,
    `lengths`, `dtype`, `threads`; `ours_us` and `native_us` (median microseconds per layer, ours
    including `metadata_us`, its share of the step's metadata over 30 layers); `ratio` (median of
    native / ours over pairs), `ratio_low` and `ratio_high` (95 % bootstrap interval), `bar` (the
    ratio asked for, or null) and `max_difference` (largest difference of the two outputs).
    """
    if clock not in CLOCKS:
        raise typer.BadParameter(f"--clock {clock} is unknown: choose wall or cpu.")
    if clock == "cpu" and threads != [1]:
        raise typer.BadParameter("--clock cpu sees one thread only: drop --threads.")
    cases = [
        case
        for case in all_cases(threads)
        if case.batch in batches
        and set(only.split()) <= {case.shape, case.phase, case.lengths, case.dtype}
    ]
    console = Console(stderr=True)
    results = [
        measure(case, rounds, CLOCKS[clock]) for case in track(cases, "attention", console=console)
    ]
    if as_json:
        report = {**taken_on(), "clock": clock, "rounds": rounds, "cases": results}
        print(json.dumps(report, indent=1))
        return
    print_table(results, f"one attention layer, {clock} time, {describe_machine()}")


if __name__ == "__main__":
    command.run(main, smoke='--rounds 1 --batch 1 --only "fp32 ragged"')
