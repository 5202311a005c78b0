"""What a decode step asks of an NPU: launches, copies and waits, counted on the emulated NPU.

Three servers: no speculation, SGLang's own NEXTN and MTP, all in graph mode under the overlapped
scheduler, of nano-deepseek. Run by `make bench-npu-step`, for it needs the emulation's environment.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import command
from benchmarks.machine import describe_commit, describe_machine
from sglang_ascend import env
from sglang_ascend.models.catalog import model_path

ALGORITHMS = {
    "plain": (),
    "eagle": ("--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", "1"),
    "mtp": ("--speculative-algorithm", "MTP"),
}
# SGLang's NEXTN prefills nano-deepseek's draft by a hook, which only MTP's servers have unasked.
HOOKED = {"eagle": {env.HOOKS.name: "all"}}
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.9},
}
CONTEXT_LENGTH = 256  # one block table's width: what it holds does not change the counts
COPIES = {"h2d": ("h2d", "async_h2d"), "d2h": ("d2h", "async_d2h")}
# Off in this process, by the Makefile: torch_npu writes to standard output when it is loaded.
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
MAX_SECONDS = 1800  # of a server: kernels are interpreted
console = Console(stderr=True)


def flags_of(algorithm: str, num_steps: int, batch_size: int) -> list[str]:
    flags = [*ALGORITHMS[algorithm]]
    if algorithm != "plain":
        flags += ["--speculative-num-steps", str(num_steps)]
        flags += ["--speculative-num-draft-tokens", str(num_steps + 1)]
    flags += ["--context-length", str(CONTEXT_LENGTH), "--skip-tokenizer-init"]
    flags += ["--device", "npu", "--dtype", "bfloat16", "--mem-fraction-static", "0.2"]
    flags += ["--max-total-tokens", "4096", "--max-running-requests", str(batch_size)]
    return [*flags, "--cuda-graph-bs-decode", str(batch_size)]


def step_of(report: Any) -> dict[str, Any]:
    """The steady step of a run: every request in it, nothing new. Counts by key."""
    steady = report.steady()
    calls = steady.calls
    host = [seconds * 1e3 for seconds in steady.host_seconds]
    return {
        # A kernel that is not torch_npu's is a launch like any other.
        "launches": calls.get("launches", 0) + steady.num_kernels,
        "stream_syncs": calls.get("stream_syncs", 0) + calls.get("device_syncs", 0),
        "event_syncs": calls.get("event_syncs", 0),
        **{key: sum(calls.get(name, 0) for name in names) for key, names in COPIES.items()},
        "blocking_copies": calls.get("h2d", 0) + calls.get("d2h", 0),
        "host_ms": statistics.median(host),
        "host_ms_spread": [min(host), max(host)],
        "num_steps_alike": f"{steady.num_alike} of {steady.num_iterations}",
    }


def measure(batch_size: int, num_steps: int, new_tokens: int, samplings: Sequence[str]) -> dict:
    from npu_emulation.sglang_runs import FUSED_ATTENTION, prompt, served

    folder = model_path("nano-deepseek")
    prompts = [prompt(9 + 2 * i, i, vocabulary=1900) for i in range(batch_size)]
    measured: dict[str, Any] = {}
    runs = [(sampling, algorithm) for sampling in samplings for algorithm in ALGORITHMS]
    for sampling, algorithm in track(runs, "servers", console=console):
        parameters = SAMPLING[sampling] | {"max_new_tokens": new_tokens, "ignore_eos": True}
        wave = [{"input_ids": tokens, "sampling_params": parameters} for tokens in prompts]
        try:
            report = served(
                folder,
                [wave],
                flags_of(algorithm, num_steps, batch_size),
                environ=FUSED_ATTENTION | {AUTOLOAD: "1"} | HOOKED.get(algorithm, {}),
                timeout=MAX_SECONDS,
            )
        except AssertionError as error:
            # SGLang's sampled NEXTN stops here for want of a kernel of sgl_kernel_npu.
            measured.setdefault(sampling, {})[algorithm] = {"stopped": str(error)[-200:]}
            continue
        measured.setdefault(sampling, {})[algorithm] = step_of(report)
    return measured


def print_table(sampling: str, steps: dict[str, dict[str, Any]]) -> None:
    table = Table(title=f"A decode step, {sampling}; host path on emulated NPU, not an NPU result")
    names = ("launches", "stream_syncs", "event_syncs", "h2d", "d2h", "host_ms")
    for name in ("", *names):
        table.add_column(name)
    for algorithm, step in steps.items():
        cells = [f"{step[name]:.3g}" if name in step else "stopped" for name in names]
        table.add_row(algorithm, *cells)
    console.print(table)


def main(
    batch_size: Annotated[int, typer.Option(help="Requests in a step.")] = 8,
    num_steps: Annotated[int, typer.Option("--num-steps", help="K, drafts of a step.")] = 3,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each reply.")] = 28,
    greedy_only: Annotated[bool, typer.Option(help="Leave out temperature 0.8, top-p.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Counts the launches, copies and synchronisations of a steady decode step on the emulated NPU.

    Host time is that of a loop's turn without the device's work, which the host does here. A launch
    costs more than on a device, so only the ratio between servers means something.
    """
    if "NPU_EMULATION" not in os.environ:
        raise typer.BadParameter("this needs the emulated NPU: run `make bench-npu-step`.")
    measured = measure(
        batch_size, num_steps, new_tokens, list(SAMPLING)[: 1 if greedy_only else None]
    )
    for sampling, steps in measured.items():
        print_table(sampling, steps)
    if as_json:
        settings = {"model": "nano-deepseek", "batch_size": batch_size, "K": num_steps}
        found = {
            "machine": f"emulated NPU on {describe_machine()}",
            "commit": describe_commit(),
            **settings,
            **measured["greedy"],
            "sampled": measured.get("sampled"),
        }
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    command.run(main, smoke="--batch-size 2 --new-tokens 16 --greedy-only")
