"""A launch of a listed kernel on the CPU: arguments, what is expected, what must be noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from guarded_memory import guarded_copy, in_a_process
from linalg_on_cpu import Executable

Argument = torch.Tensor | int | float


@dataclass(frozen=True)
class Launch:
    """A grid, arguments whose tensors are just large enough, and what some hold afterwards.

    ``expected`` maps the place of an output among the arguments to its values; every other tensor
    must stay what it was. ``tolerance``: the largest deviation from float64 that rounding explains.
    ``changes`` are replacements in the linalg of a 910, each of which must be noticed.
    """

    grid: tuple[int, ...]
    arguments: tuple[Argument, ...]
    expected: dict[int, torch.Tensor]
    changes: Sequence[tuple[str, str]]
    tolerance: float = 0.0

    def run(self, code: Executable) -> list[Argument]:
        """The arguments after the launch, which works on copies."""
        copies = [
            argument.clone() if isinstance(argument, torch.Tensor) else argument
            for argument in self.arguments
        ]
        code.run(self.grid, *copies)
        return copies

    def deviations(self, code: Executable) -> dict[int, float]:
        """The tensors that are not as expected, by place, each with its largest deviation."""
        found = {}
        for place, argument in enumerate(self.run(code)):
            if not isinstance(argument, torch.Tensor):
                continue
            wanted = self.expected.get(place, self.arguments[place])
            same = (argument == wanted) | (argument.isnan() & wanted.isnan())
            deviation = (argument.double() - wanted.double()).abs()[~same]
            if deviation.numel() and not deviation.max() <= self.tolerance:
                found[place] = deviation.max().item()
        return found

    def run_guarded(self, code: Executable, at_end: bool) -> None:
        """Once more, with what lies before each tensor, or behind it, forbidden to the byte."""
        guarded = [
            guarded_copy(argument, at_end) if isinstance(argument, torch.Tensor) else argument
            for argument in self.arguments
        ]
        code.run(self.grid, *guarded)


def is_right(launch: Callable[[], Launch], linalg: str) -> bool | None:
    """Whether nothing deviates; None where the launch ends its process."""
    return in_a_process(_is_right, launch, linalg)


def stays_inside(launch: Callable[[], Launch], linalg: str) -> bool:
    """Whether a launch leaves the memory before and behind its tensors alone."""
    return in_a_process(_ends, launch, linalg) is True


def _is_right(launch: Callable[[], Launch], linalg: str) -> bool:
    return not launch().deviations(Executable(linalg))


def _ends(launch: Callable[[], Launch], linalg: str) -> bool:
    code = Executable(linalg)
    for at_end in (False, True):
        launch().run_guarded(code, at_end)
    return True
