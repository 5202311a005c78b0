"""Which server a command talks to: one that runs, or one that it starts on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

MTP = ("--speculative-algorithm", "MTP")
ModelOption = Annotated[
    str | None,
    typer.Option(help="A model of this package or a checkpoint folder, served for this command."),
]

ServerArgsOption = Annotated[
    str, typer.Option(help='Flags of SGLang for what is started, such as "--dtype float32".')
]

NumPromptsOption = Annotated[int | None, typer.Option(min=1, help="Of each task; default all.")]

TemperatureOption = Annotated[
    float,
    typer.Option(min=0, help="Above 0 replies are drawn, and differ from server to server."),
]


def model_folder(model: str) -> Path:
    """Of a checkpoint on disk, or of a model of this package, built on first use."""
    from sglang_ascend.models import catalog

    if Path(model).is_dir():
        return Path(model)
    if model not in catalog.MODELS:
        names = " or ".join(catalog.MODELS)
        raise ValueError(
            f"{model!r} is not a model of this package and no folder: choose {names}, or name the "
            "folder of a checkpoint."
        )
    return catalog.model_path(model)


def flags_of(server_args: str) -> list[str]:
    """What --server-args says. Raises ValueError where it has a quotation mark alone."""
    try:
        return shlex.split(server_args)
    except ValueError as error:
        raise ValueError(f"--server-args {server_args} cannot be read: {error}.") from None


@contextmanager
def server_url(url: str | None, model: str | None, server_args: str) -> Iterator[str]:
    """``url``, or that of a server of ``model`` with MTP, which is stopped behind the block."""
    if (url is None) == (model is None):
        raise ValueError("name either a running server with --url, or a checkpoint with --model.")
    if url is not None:
        if server_args:
            raise ValueError("--server-args are for a server that is started: name --model.")
        yield url
        return
    from rich.console import Console

    from sglang_ascend.bench.server import starting_server

    folder = model_folder(model or "")
    with starting_server("--model-path", str(folder), *MTP, *flags_of(server_args)) as server:
        with Console(stderr=True).status(f"starting a server of {folder.name}"):
            server.wait_until_ready()
        yield server.url
