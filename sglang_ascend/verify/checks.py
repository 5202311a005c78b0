"""What a part of the verification finds: checks that passed, failed, or only measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Measured = Mapping[str, float | int | str]
# Called with what is being checked and how many of these there are in all.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Check:
    """One claim. ``passed`` is None where there is nothing to judge; ``note`` then says why."""

    name: str
    passed: bool | None
    measured: Measured = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class PartResult:
    """``key`` tells on what it was found: another machine, version or setting has another one."""

    part: str
    key: str
    seconds: float
    checks: tuple[Check, ...]

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> PartResult:
        checks = tuple(Check(**check) for check in fields["checks"])
        return cls(fields["part"], fields["key"], fields["seconds"], checks)


def found_by(name: str, run: Callable[[], Check]) -> Check:
    """``run``'s check, or a failed one of this name with what ``run`` raised. A device may say that
    a kernel failed when it is launched, when its result is fetched, or when the next call is made.
    """
    try:
        return run()
    except Exception as error:
        return Check(name, False, note=sentence_of(error))


def sentence_of(error: BaseException) -> str:
    """An exception as one line of a report."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
