"""How every command says what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def refusals(*also: type[Exception]) -> Iterator[None]:
    """A ValueError, an OSError and any of ``also`` are one sentence on stderr, and exit code 2."""
    try:
        yield
    except (ValueError, OSError, *also) as error:
        typer.echo(f"sglang-ascend: {_sentence(error)}", err=True)
        raise typer.Exit(2) from None


def _sentence(error: Exception) -> str:
    """What the error says; of an error of the system the file, and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    return str(error)
