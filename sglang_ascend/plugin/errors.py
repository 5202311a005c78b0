"""How the plugin refuses to start, and whether a folder can be written to."""

from __future__ import annotations

import os
from pathlib import Path


class StartupRefused(SystemExit):
    """One sentence for the user; Python prints it and exits with code 1.

    No ``Exception``, on purpose: SGLang logs and swallows any of those that a plugin raises, and
    would start without us. A program using ``sgl.Engine`` catches it as ``SystemExit``.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(f"sglang-ascend: {sentence}")


def unwritable(folder: Path) -> str | None:
    """Why no file can be written to ``folder``, which is made if it is missing; None if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror
    return None if os.access(folder, os.W_OK | os.X_OK) else "not writable"
