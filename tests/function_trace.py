"""The functions of this package that a piece of work executes, and the files they are in."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import sglang_ascend

PACKAGE = Path(sglang_ascend.__file__).parent


class FunctionTrace:
    """Within its ``with`` block: every function of the package that this thread calls, as
    "path/in/package.py qualified.name", in the order of the first calls."""

    def __init__(self) -> None:
        self.functions: dict[str, None] = {}
        self._known: set[CodeType] = set()

    def __enter__(self) -> FunctionTrace:
        sys.setprofile(self._see)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._known:
            return
        self._known.add(code)
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            self.functions.setdefault(f"{path.relative_to(PACKAGE)} {code.co_qualname}")


def files_of(functions: list[str]) -> list[str]:
    """Each file once, in the order in which it is first entered."""
    return list(dict.fromkeys(function.split()[0] for function in functions))


def documented_step(section: str) -> list[tuple[str, str]]:
    """(file, function) of every row of a section of docs/decode-step.md."""
    text = (PACKAGE.parent / "docs" / "decode-step.md").read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.M)
    return re.findall(r"^\| `(\S+\.py)` \| `(\S+)` \|", body, re.MULTILINE)


def check_documented(section: str, executed: list[str], most_files: int) -> None:
    """The section names the files that were executed, in their order, and a function of each."""
    rows = documented_step(section)
    listed, entered = [file for file, _ in rows], files_of(executed)
    assert listed == entered, f"listed {listed}, entered {entered}"
    not_called = [row for row in rows if " ".join(row) not in executed]
    assert not_called == [], f"listed and not called: {not_called}"
    assert len(rows) <= most_files, f"{len(rows)} files"
