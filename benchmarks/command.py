"""How every benchmark becomes a command: typer's, and ``--smoke`` for its shortest run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import Any

import typer

SMOKE = "--smoke"


def run(main: Callable[..., Any], smoke: str) -> None:
    """Runs ``main`` on the command line, where ``--smoke`` stands for the flags ``smoke``.

    A short run shows that the command works and what its JSON holds; its figures mean nothing.
    Flags that are given beside ``--smoke`` overrule it.
    """
    app = typer.Typer(add_completion=False)
    app.command(epilog=f"{SMOKE} stands for {smoke}: one short round of the smallest sizes.")(main)
    words = [word for word in sys.argv[1:] if word != SMOKE]
    app(words if SMOKE not in sys.argv else [*shlex.split(smoke), *words])
