"""Int8 serving beside the best float dtype of this CPU: tokens per second, bytes, loading.

Four servers, alternating in one run: float and W8A8 with an int8 head, each with and without MTP.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.command import run
from benchmarks.machine import taken_on
from benchmarks.server import ServerProcess, starting_server
from benchmarks.serving import alternate, measure
from sglang_ascend.bench.figures.ratios import spread
from sglang_ascend.models.catalog import model_path
from sglang_ascend.ptq.quantize import Quantization
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.product import held, is_decoded
from sglang_ascend.quantization.recipe import read_recipe
from sglang_ascend.tables import print_whole

PARTS = Path(__file__).parent / "server_parts"
PROMPTS = Path(__file__).parent.parent / "tests" / "data" / "heldout_chat.json"
MTP = ("--speculative-algorithm", "MTP")
BFLOAT16_BYTES = 2


def resident_share(folder: Path) -> float:
    """Bytes that serving prepares of the quantized linears, over those of bfloat16."""
    checkpoint, kept, floats = Checkpoint.open(folder), 0, 0
    for module in checkpoint.schemes:
        if not is_decoded(module):
            weight = checkpoint.weight(module)
            kept += held(weight).num_bytes
            floats += BFLOAT16_BYTES * weight.codes.numel()
    return kept / floats


def loading(folder: Path, path: Path) -> dict[str, float]:
    """What the part ``loading_memory`` of the server wrote to ``path``, and the bound."""
    stayed, peak = json.loads(path.read_text())
    files = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return {"stayed": stayed, "peak": peak, "weights_and_a_shard": sum(files) + max(files)}


def start_servers(
    stack: ExitStack, folders: dict[str, Path], dtype: str, scratch: Path
) -> dict[str, ServerProcess]:
    servers = {}
    for kind, folder in folders.items():
        for name, flags in (("plain", ()), ("mtp", MTP)):
            # The servers share the cores: one that is not asked must not spin.
            start = starting_server(
                *("--model-path", str(folder), "--sleep-on-idle", "--dtype", dtype),
                *flags,
                PYTHONPATH=str(PARTS),
                BENCHMARK_PARTS="loading_memory",
                LOADING_MEMORY=str(scratch / f"{kind}-{name}.json"),
            )
            servers[f"{kind}_{name}"] = stack.enter_context(start)
    for server in servers.values():
        server.wait_until_ready()
    return servers


def summarise(rounds: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Medians of each server, and the ratios within the rounds."""

    def ratio(over: str, under: str) -> dict[str, float]:
        return spread([one[over][0] / one[under][0] for one in rounds])

    summary: dict[str, Any] = {
        name: {
            "tokens_per_s": statistics.median(one[name][0] for one in rounds),
            "accept_length": statistics.median(one[name][1] for one in rounds),
        }
        for name in rounds[0]
    }
    summary["int8_over_float_plain"] = ratio("int8_plain", "float_plain")
    summary["int8_over_float_mtp"] = ratio("int8_mtp", "float_mtp")
    summary["mtp_over_plain_int8"] = ratio("int8_mtp", "int8_plain")
    summary["mtp_over_plain_float"] = ratio("float_mtp", "float_plain")
    return summary


def main(
    model: Annotated[str, typer.Option(help="Catalogue name or folder; float.")] = "smollm2-mtp",
    recipe: Annotated[str, typer.Option(help="As `sglang-ascend quantize` takes.")] = "w8a8-head",
    dtype: Annotated[
        str, typer.Option(help="Of all servers; auto: what serves fastest here.")
    ] = "auto",
    batches: Annotated[list[int], typer.Option("--batch", help="Requests at once.")] = [1, 8],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Alternating rounds per batch size.")] = 9,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per reply.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure int8 and float serving, plain and with MTP, alternating.

    JSON: `machine`, `commit`, `model`, `recipe`, `resident_share` (bytes of the quantized linears
    over those of bfloat16), `loading` (of the int8 server's target, bytes: what `stayed`, the
    `peak`, and its bound `weights_and_a_shard`) and, for each batch size, `batch_N` with the
    medians of each server (`tokens_per_s`, `accept_length`) and ratios with a 95 % interval:
    `int8_over_float_plain`, `int8_over_float_mtp`, `mtp_over_plain_int8`, `mtp_over_plain_float`.
    """
    source = Path(model) if Path(model).is_dir() else model_path(model)
    prompts = [entry["prompt"] for entry in json.loads(PROMPTS.read_text(encoding="utf-8"))]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        quantized = scratch / "quantized"
        Quantization(source, read_recipe(recipe), quantized).run()
        share = resident_share(quantized)  # compiles what the servers' loading would
        servers = start_servers(stack, {"float": source, "int8": quantized}, dtype, scratch)
        report: dict[str, Any] = {
            **taken_on(),
            "model": model,
            "recipe": recipe,
            "resident_share": share,
            "loading": loading(quantized, scratch / "int8-plain.json"),
        }
        for batch in batches:
            results = alternate(
                servers,
                lambda server, group: measure(server, group, max_new_tokens),
                prompts,
                batch,
                rounds,
            )
            report[f"batch_{batch}"] = summarise(results)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print_table(report, batches)


def print_table(report: dict[str, Any], batches: list[int]) -> None:
    table = Table(title=f"{report['model']}, {report['recipe']}, on {report['machine']}")
    columns = ("batch", "float tok/s", "int8 tok/s", "int8 / float", "float MTP", "int8 MTP")
    for column in (*columns, "MTP / plain, int8", "tokens/forward"):
        table.add_column(column, justify="right")
    for batch in batches:
        row = report[f"batch_{batch}"]
        rates = {name: f"{row[name]['tokens_per_s']:.1f}" for name in row if "over" not in name}
        table.add_row(
            str(batch),
            rates["float_plain"],
            rates["int8_plain"],
            f"{row['int8_over_float_plain']['median']:.2f}",
            rates["float_mtp"],
            rates["int8_mtp"],
            f"{row['mtp_over_plain_int8']['median']:.2f}",
            f"{row['int8_mtp']['accept_length']:.2f}",
        )
    print_whole(table)
    share, held = 100 * report["resident_share"], report["loading"]
    Console().print(
        f"quantized linears: {share:.1f} % of bfloat16's bytes; loading: {held['peak'] / 2**20:.0f}"
        f" MiB at the peak, bound {held['weights_and_a_shard'] / 2**20:.0f}"
    )


if __name__ == "__main__":
    run(main, "--model nano-deepseek --batch 1 --rounds 1 --max-new-tokens 8")
