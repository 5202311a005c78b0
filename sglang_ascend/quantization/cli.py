"""`sglang-ascend inspect`, `verify` and `convert`: checkpoints of any layout, on any machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_ascend.refusals import refusals
from sglang_ascend.tables import print_whole

if TYPE_CHECKING:
    from sglang_ascend.quantization.checkpoint import Checkpoint

app = typer.Typer()

FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of a checkpoint, float or quantized.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for a script.")]


class Target(StrEnum):
    """Names as of the writers in ``quantization.writers``, which would load torch."""

    MODELSLIM = "modelslim"
    COMPRESSED_TENSORS = "compressed-tensors"
    FLOAT32 = "float32"


@app.command()
def inspect(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Say what a checkpoint is: its layout, the scheme and bytes of each layer, what serves it.

    Reads ModelSlim, compressed-tensors, GPTQ, AWQ, block FP8 and float checkpoints: their headers,
    and one weight of each scheme to see which body multiplies it on this CPU. "none: convert" is a
    scheme that is not served. The exit code is 2 when the checkpoint is refused.

    Example: `sglang-ascend inspect $(sglang-ascend model-path nano-deepseek)`
    """
    with refusals():
        from sglang_ascend.quantization.checkpoint import Checkpoint
        from sglang_ascend.quantization.inspection import contents

        found = contents(Checkpoint.open(folder))
        if as_json:
            typer.echo(json.dumps(found.as_dict(), indent=2))
        else:
            print_whole(found.table())


@app.command()
def verify(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Read every tensor of a checkpoint and refuse what is wrong in it.

    Each quantized weight is decoded: codes and scales have the right shape, scales are finite and
    above 0, floats finite. Files have the SHA-256 that the checkpoint records, if it does. Of a
    family with an MTP layer that SGLang serves no tensor is missing or of another shape. The first
    fault is one sentence, and the exit code is 2.

    Example: `sglang-ascend verify $(sglang-ascend model-path nano-deepseek)`
    """
    with refusals():
        from dataclasses import asdict

        from sglang_ascend.quantization.checkpoint import Checkpoint
        from sglang_ascend.quantization.verification import verify

        checkpoint = Checkpoint.open(folder)
        with _progress(checkpoint, "reading") as progress:
            verified = verify(checkpoint, progress)
        if as_json:
            typer.echo(json.dumps(asdict(verified)))
        else:
            typer.echo(
                f"{folder} is sound: {verified.num_modules} quantized modules, "
                f"{verified.num_float_tensors} float tensors, {verified.num_bytes:,} bytes, "
                f"{verified.num_hashes} hashes"
            )


@app.command()
def convert(
    folder: FolderArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    to: Annotated[Target, typer.Option(help="The layout that is written.")],
) -> None:
    """Write a checkpoint in another layout, with the same weights and beside its tokenizer.

    `modelslim` and `compressed-tensors` keep every code and scale, and refuse what they have no
    place for. `float32` decodes all weights, for any tool that knows no quantization.

    One shard is in memory at a time. OUT appears when it is complete; a folder that exists is never
    written to. The exit code is 2 when the checkpoint is refused.

    Example: `sglang-ascend convert Qwen2.5-7B-GPTQ Qwen2.5-7B-float --to float32`
    """
    with refusals():
        from sglang_ascend.quantization.checkpoint import Checkpoint
        from sglang_ascend.quantization.convert import convert
        from sglang_ascend.quantization.writers import make_writer

        checkpoint = Checkpoint.open(folder)
        with _progress(checkpoint, "writing") as progress:
            convert(checkpoint, out, make_writer(to, checkpoint.layout), progress)
        typer.echo(f"{out} holds {folder} as {to}", err=True)


@contextmanager
def _progress(checkpoint: Checkpoint, verb: str) -> Iterator[Callable[[int], object]]:
    """A bar over the bytes of the checkpoint, on a terminal."""
    from tqdm import tqdm

    total = sum(entry.num_bytes for entry in checkpoint.entries.values())
    with tqdm(total=total, desc=verb, unit="B", unit_scale=True, disable=None) as bar:
        yield bar.update
