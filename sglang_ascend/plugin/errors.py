"""How the plugin refuses to start."""

from __future__ import annotations


class StartupRefused(SystemExit):
    """One sentence for the user; Python prints it and exits with code 1.

    No ``Exception``, on purpose: SGLang logs and swallows any of those that a plugin raises, and
    would start without us. A program using ``sgl.Engine`` catches it as ``SystemExit``.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(f"sglang-ascend: {sentence}")
