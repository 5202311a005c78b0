"""All that a CUDA GPU can show of this package, in one call; without a GPU it says so."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import command, gpu_correctness, mla_verify, serving, top_k_top_p
from benchmarks.machine import taken_on
from sglang_ascend.tables import print_whole
from sglang_ascend.verify.checks import Check, sentence_of

PACKAGES = ("torch", "triton", "sglang", "flashinfer-python")
VOCAB_SIZE = 129280
ROWS = 64 * 4
PROMPTS = Path(__file__).parents[1] / "tests" / "data" / "heldout_maths.json"
# SGLang's own algorithm of the same chain: what MTP is compared with.
NEXTN = "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1"
NEXTN += " --speculative-num-draft-tokens 4"
# Bodies for CUDA that no server calls: what each would stand for, should its times here be better.
CANDIDATES = {
    "attention.paged_gqa": "FlashInfer's attention over pages, in decode and verification",
    "attention.paged_mla": "FlashInfer's latent attention, in decode and verification",
    "chain.prepare_step": "SGLang's EAGLE worker, by this package's own step",
    "chain.verify_chain": "SGLang's EAGLE worker, by this package's own step",
    "chain.place_draft_decode": "SGLang's EAGLE worker, by this package's own step",
    "sampling.top_k_top_p": "FlashInfer's filters",
    "sampling.filter_probs": "FlashInfer's filters, with rejection sampling",
}
console = Console(stderr=True)

Report = dict[str, Any]


def attempt(measure: Callable[[], Any]) -> Any:
    """What one measurement gives, or in words why it gives nothing: the others are still made."""
    try:
        return measure()
    except Exception as error:
        return {"failed": sentence_of(error)}


def attention_times(device_name: str, rounds: int) -> list[Any]:
    def measure(case: mla_verify.Case) -> Any:
        return mla_verify.measure(case, mla_verify.peaks_of(device_name), rounds)

    cases = [mla_verify.Case(*sizes) for sizes in product((16, 128), (1, 2, 4))]
    return [attempt(partial(measure, case)) for case in cases]


def filter_times(rounds: int) -> list[Any]:
    clock = top_k_top_p.CLOCKS["wall"]
    cases = [
        top_k_top_p.Case(top_k, top_p, ROWS, VOCAB_SIZE, dtype)
        for dtype in ("fp32", "bf16")
        for top_k, top_p in top_k_top_p.FILTERS
    ]
    return [attempt(partial(top_k_top_p.measure, case, "cuda", rounds, clock)) for case in cases]


def server_rates(folder: Path, rounds: int) -> Report:
    """Output tokens/s of a model without speculation, with MTP and with SGLang's own NEXTN."""
    prompts = [entry["prompt"] for entry in json.loads(PROMPTS.read_text(encoding="utf-8"))]
    random.Random(0).shuffle(prompts)
    common = ("--model-path", str(folder), "--mem-fraction-static", "0.25")
    flags = {"plain": [], "mtp": ["--speculative-algorithm", "MTP"], "nextn": NEXTN.split()}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving.starting_server(*common, *extra))
            for name, extra in flags.items()
        }
        for server in servers.values():
            server.wait_until_ready()
        return {
            f"batch_{batch}": serving.summarise(
                serving.run_rounds(servers, prompts, batch, rounds, 128)
            )
            for batch in (1, 8)
        }


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def examine(model: Path | None, rounds: int) -> Report:
    """Correctness first: a kernel that is wrong is not timed."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    report: Report = {**taken_on(), "device": device, "versions": versions()}
    report |= {"correct": None, "checks": [], "mla_verify": [], "top_k_top_p": [], "serving": None}
    if device is None:
        return report
    with console.status("kernels against float64"):
        checks = gpu_correctness.check_kernels("cuda", gpu_correctness.Sizes())
    report["checks"] = [vars(check) for check in checks]
    report["correct"] = not any(check.passed is False for check in checks)
    if not report["correct"]:
        return report
    with console.status("latent attention"):
        report["mla_verify"] = attention_times(device, rounds)
    with console.status("top-k and top-p"):
        report["top_k_top_p"] = filter_times(rounds)
    if model is not None and find_spec("sglang"):
        with console.status("servers"):
            report["serving"] = attempt(partial(server_rates, model, rounds))
    return report


def print_report(report: Report) -> None:
    title = f"{report['device']}, {report['machine']}"
    judged = Table("check", "result", "note", title=title)
    for fields in report["checks"]:
        check = Check(**fields)
        result = {True: "pass", False: "FAIL", None: "-"}[check.passed]
        judged.add_row(check.name, result, check.note)
    Console().print(judged)
    for name in ("mla_verify", "top_k_top_p"):
        rows = report[name]
        columns = dict.fromkeys(key for row in rows for key in row)
        table = Table(*columns, title=f"{name}, {report['device']}")
        for row in rows:
            table.add_row(*(shown(row.get(column)) for column in columns))
        print_whole(table)
    if report["serving"]:
        Console().print_json(data=report["serving"])


def shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)


def main(
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder to serve; needs SGLang for CUDA.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of each timing.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Check, then time the Triton kernels on a CUDA GPU beside their peers, and MTP in a server.

    JSON: {machine, commit, device, versions, correct, checks, mla_verify, top_k_top_p, serving};
    the two lists are those of the benchmarks of the same names, FlashInfer's times among them where
    it is installed. A measurement that failed says so under "failed". Without a CUDA device: device
    and correct null, nothing measured, exit status 0. Exit status 1 when a kernel is wrong.

    Example: make bench-gpu ARGS="--model my-checkpoint" > gpu.json
    """
    report = examine(model, rounds)
    if as_json:
        print(json.dumps(report, indent=1))
    elif report["device"] is None:
        print("No CUDA device here: nothing was measured.")
    else:
        print_report(report)
    raise typer.Exit(1 if report["correct"] is False else 0)


if __name__ == "__main__":
    command.run(main, smoke="--rounds 1")
