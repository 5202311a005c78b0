"""Which stages are done, by which options, after what: a file that a killed command goes on by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_ascend.files import write_json
from sglang_ascend.training.provenance import sha256

FILE_NAME = "stages.json"


@dataclass(frozen=True)
class Stage:
    """One stage and the options that decide what it writes, by the names that a user knows.

    Attributes:
        fixed: what has been made is of no use with another value of these.
        grows: numbers that may be larger next time; the stage then goes on.
        again: the stage is cheap and is done again whenever its options or stages before changed.
    """

    name: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    grows: Mapping[str, int] = field(default_factory=dict)
    again: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {**self.fixed, **self.grows}


class Stages:
    """The record in `out`; a stage is entered into it before it begins and again when it is done.

    Raises:
        ValueError: the record cannot be read.
    """

    def __init__(self, out: Path) -> None:
        self.path = out / FILE_NAME
        self.entries: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            try:
                self.entries = json.loads(self.path.read_text(encoding="utf-8"))["stages"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{self.path} is damaged: delete it to begin again over what the folder holds, "
                    "or name another --out."
                ) from None
        self._after = ""

    def check(self, stages: list[Stage]) -> None:
        """Refuses options that would spoil what is there, before anything is computed.

        Raises:
            ValueError: naming the first.
        """
        for stage in stages:
            entry = self.entries.get(stage.name)
            if entry is None or stage.again:
                continue
            before = entry["options"]
            for name, value in _plain(stage.fixed).items():
                if before.get(name) != value:
                    raise ValueError(
                        f"{name} is {value} and was {before.get(name)} when stage {stage.name!r} "
                        f"of {self.path.parent} began: keep it as it was, or name another --out."
                    )
            for name, value in stage.grows.items():
                if before.get(name, 0) > value:
                    raise ValueError(
                        f"{name} is {value} and was {before[name]} when stage {stage.name!r} of "
                        f"{self.path.parent} began: ask for as many or more, or name another --out."
                    )

    def forget(self, name: str) -> None:
        """As if that stage had never begun."""
        self.entries.pop(name, None)

    def is_done(self, stage: Stage) -> bool:
        """With these options, after the same stages, and its files are still there."""
        entry = self.entries.get(stage.name, {})
        same = entry.get("options") == _plain(stage.options) and entry.get("after") == self._after
        return bool(entry.get("done") and same and all(map(Path.exists, self._files(stage.name))))

    def recorded(self, name: str, option: str) -> int:
        """What a number that grows was when the stage last began; 0 if it never did."""
        return self.entries.get(name, {}).get("options", {}).get(option, 0)

    def check_files(self, *names: str) -> None:
        """Refuses to go on from files of these stages that are not as they were written.

        Raises:
            ValueError: naming the first.
        """
        files = {path: written for name in names for path, written in self._files(name).items()}
        for path, written in files.items():
            if sha256(path) != written:
                raise ValueError(
                    f"{path} is not what was written there: delete it and run the same command "
                    "again, which makes another in its place."
                )

    def _files(self, name: str) -> dict[Path, str]:
        files = self.entries.get(name, {}).get("files", {})
        return {self.path.parent / path: digest for path, digest in files.items()}

    def begin(self, stage: Stage) -> None:
        self._enter(stage, False, ())

    def finish(self, stage: Stage, files: Iterable[Path] = ()) -> None:
        """`files` in the folder are what later stages go on from."""
        self._enter(stage, True, files)

    def pass_by(self, stage: Stage) -> None:
        """Goes on behind a stage that is done: later ones depend on it."""
        text = json.dumps([self._after, self.entries[stage.name]["options"]], sort_keys=True)
        self._after = hashlib.sha256(text.encode()).hexdigest()

    def _enter(self, stage: Stage, done: bool, files: Iterable[Path]) -> None:
        self.entries[stage.name] = {
            "options": _plain(stage.options),
            "after": self._after,
            "done": done,
            "files": {str(path.relative_to(self.path.parent)): sha256(path) for path in files},
        }
        write_json(self.path, {"stages": self.entries})


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives them back."""
    return json.loads(json.dumps(options))
