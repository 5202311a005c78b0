"""The command `sglang-ascend`; its help loads neither torch nor SGLang, each command its own."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sglang_ascend import __version__
from sglang_ascend.bench.chat import chat
from sglang_ascend.bench.command import bench
from sglang_ascend.bench.options import model_folder
from sglang_ascend.memory.command import plan_memory
from sglang_ascend.ptq.cli import evaluate, quantize
from sglang_ascend.quantization.cli import app as quantization_app
from sglang_ascend.refusals import refusals
from sglang_ascend.speculative.adaptive.cli import plan_speculation
from sglang_ascend.training.cli import app as training_app
from sglang_ascend.training.draft_model.command import train_draft
from sglang_ascend.training.pipeline.command import train_mtp
from sglang_ascend.training.vocabulary.command import build_vocabulary

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help=(
        "MTP speculative decoding for SGLang, on Ascend NPUs and on any CPU.\n\n"
        "Serving itself is SGLang's own command:\n\n"
        "`python -m sglang.launch_server --model-path $(sglang-ascend model-path smollm2-mtp) "
        "--speculative-algorithm MTP`"
    ),
)
app.add_typer(training_app, name="train")
app.add_typer(quantization_app)
app.command()(quantize)
app.command()(evaluate)
app.command()(bench)
app.command()(chat)
app.command()(plan_speculation)
app.command()(plan_memory)
app.command()(build_vocabulary)
app.command()(train_mtp)
app.command()(train_draft)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sglang-ascend {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for a script or a bug report.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            help="Also compare torch_npu's operators with what this package knows of them."
        ),
    ] = False,
) -> None:
    """Say what is installed, what SGLang chose, what is in place, and what is off.

    Loads SGLang's plugins as a server does, so it takes as long as `import sglang`. The exit code
    is 1 when there is a problem; each is printed as one sentence with its remedy.

    Example: `sglang-ascend doctor --json > doctor.json`
    """
    from rich.console import Console

    from sglang_ascend.plugin.doctor.command import examine

    with Console(stderr=True).status("loading SGLang and its plugins"):
        report = examine(strict=strict)
    if as_json:
        typer.echo(report.to_json())
    else:
        report.print(Console())
    raise typer.Exit(1 if report.problems else 0)


class Part(StrEnum):
    """Names as in ``verify.run.PARTS``, which would load torch."""

    OPERATORS = "operators"
    SYNCHRONISATION = "synchronisation"
    OPERATOR_SPEED = "operator-speed"
    SERVING = "serving"
    SERVING_WAITS = "serving-waits"


class VerifiedDevice(StrEnum):
    NPU = "npu"
    CPU = "cpu"


@app.command()
def verify_npu(
    out: Annotated[Path, typer.Option(help="Folder of the results; the same one resumes.")] = Path(
        "verify-npu"
    ),
    model: Annotated[
        list[str] | None,
        typer.Option(help="Served: a model of this package or a folder; may be repeated."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds of each timing.")] = 7,
    part: Annotated[
        list[Part] | None, typer.Option(help="Only this part, may be repeated; default all.")
    ] = None,
    device: Annotated[
        VerifiedDevice, typer.Option(help="cpu rehearses the command and says so in the report.")
    ] = VerifiedDevice.NPU,
) -> None:
    """Check an NPU: operators, waits for the device, speed, and tokens of servers with MTP.

    Serves the models of this package unless --model names others, on 127.0.0.1 only, and sends
    nothing anywhere; on an NPU not nano-deepseek, whose sizes its operators do not take, but
    random-deepseek. Writes report.json and report.md into the folder: send both back, and the
    servers' logs where something failed. Finished parts are kept there: the same command resumes.

    The exit code is 0 when every check passed, 1 when one failed, 2 when there is nothing to verify
    here, such as a machine without an NPU.

    Example: `sglang-ascend verify-npu --out my-card`
    """
    from sglang_ascend.models import catalog
    from sglang_ascend.verify import machine, report

    parts, models = part or list(Part), model or list(catalog.MODELS)
    with refusals(machine.NoNpuError):
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is no folder; name one.")
        described = machine.describe(device)
        serves = {Part.SERVING, Part.SERVING_WAITS} & set(parts)
        folders = tuple(map(model_folder, models if serves else ()))
    # Behind the check: this loads torch, which an NPU's environment may be unable to.
    from sglang_ascend.verify.run import Verification, run

    typer.echo(described.label, err=True)
    results = run(Verification(described, folders, out, rounds), parts)
    typer.echo(report.write_report(out, described, results))
    typer.echo(report.verdict(results), err=True)
    raise typer.Exit(0 if report.passed(results) else 1)


@app.command()
def model_path(
    name: Annotated[str, typer.Argument(help="A model of this package, such as `smollm2-mtp`.")],
) -> None:
    """Print the folder of a ready checkpoint, building it on first use.

    The folder is all that `--model-path` takes, here or on CUDA; nothing else goes to stdout.

    Example: `ls $(sglang-ascend model-path nano-deepseek)`
    """
    from sglang_ascend.models import catalog

    with refusals():
        typer.echo(catalog.model_path(name))
