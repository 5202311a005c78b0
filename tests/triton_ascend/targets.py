"""The chips that kernels are lowered for, and how bishengir says that only `hivmc` is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Target:
    """A chip by bishengir's name, the program that lowers for it, and triton-ascend's options.

    ``reached`` is the line on stderr that comes after the last pass.
    """

    name: str
    program: str
    code_generator: str
    reached: str
    options: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def _a2_or_a3(name: str) -> Target:
    returned = "error: External hivmc run fails, returning module before running external compiler"
    return Target(name, "bishengir-compile", "hivmc", returned)


TARGETS = (
    _a2_or_a3("Ascend910B3"),
    _a2_or_a3("Ascend910_9392"),
    Target(  # a 950
        "Ascend910_9589",
        "bishengir-compile-a5",
        "hivmc-a5",
        "[ERROR] Cannot find hivmc-a5 under $PATH",
        # triton-ascend derives these from "is it a 950", a constant False of its source.
        {
            "compile_on_910_95": True,
            "multibuffer": False,
            "enable_auto_bind_sub_block": False,
            "enable_select_analysis": True,
        },
        # Otherwise it takes the missing code generator for a failure of its own, and lowers anew
        # four times with the same result.
        ("--enable-tuning-mode",),
    ),
)
