"""How the plugin refuses to start, by variables and folders that are of no use too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from sglang_ascend.env import EnvironmentVariableError, Variable

T = TypeVar("T")


class StartupRefused(SystemExit):
    """One sentence for the user; Python prints it and exits with code 1.

    No ``Exception``, on purpose: SGLang logs and swallows any of those that a plugin raises, and
    would start without us. A program using ``sgl.Engine`` catches it as ``SystemExit``.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(f"sglang-ascend: {sentence}")


def value_of(variable: Variable[T]) -> T:
    """Raises StartupRefused: it has a value that does not parse."""
    try:
        return variable.get()
    except EnvironmentVariableError as error:
        raise StartupRefused(str(error)) from None


def unwritable(folder: Path) -> str | None:
    """Why no file can be written to ``folder``, which is made if it is missing; None if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror
    return None if os.access(folder, os.W_OK | os.X_OK) else "not writable"
