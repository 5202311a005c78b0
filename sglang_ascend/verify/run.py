"""The parts in order; a finished one is kept in the folder, so that a killed run goes on."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import TaskID

from sglang_ascend.verify.checks import Check, PartResult, Progress
from sglang_ascend.verify.machine import Machine
from sglang_ascend.verify.operators.against_reference import check_operators
from sglang_ascend.verify.operators.speed import time_operators
from sglang_ascend.verify.operators.synchronisation import check_synchronisation
from sglang_ascend.verify.serving import Setting, check_serving
from sglang_ascend.verify.serving_waits import check_waits

PARTS = ("operators", "synchronisation", "operator-speed", "serving", "serving-waits")
NOT_EMULATED = "an emulated NPU has no speed, and serves no model here"


@dataclass(frozen=True)
class Verification:
    """What is verified; ``models`` are checkpoints' folders, ``folder`` takes the results."""

    machine: Machine
    models: tuple[Path, ...]
    folder: Path
    rounds: int

    def key(self, part: str) -> str:
        """Of everything that the part's result depends on."""
        models = [str(model) for model in self.models]
        settings = {
            "operator-speed": [self.rounds],
            "serving": [self.rounds, models],
            "serving-waits": models,
        }
        described = [self.machine.label, self.machine.facts, settings.get(part)]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    def run_part(self, part: str, progress: Progress) -> list[Check]:
        device = self.machine.device
        if self.machine.is_emulated and part not in ("operators", "synchronisation"):
            return [Check(part, None, note=NOT_EMULATED)]
        runs: dict[str, Callable[[], list[Check]]] = {
            "operators": lambda: check_operators(device, progress),
            "synchronisation": lambda: check_synchronisation(device, progress),
            "operator-speed": lambda: time_operators(device, self.rounds, progress),
            "serving": lambda: self.serve(check_serving, progress),
            "serving-waits": lambda: self.serve(check_waits, progress),
        }
        return runs[part]()

    def serve(
        self, check: Callable[[Setting, Progress], list[Check]], progress: Progress
    ) -> list[Check]:
        """One model after another: a card need not hold four servers."""
        checks = []
        for model in self.models:
            setting = Setting(model, self.machine.device, self.folder, self.rounds)

            def advance(what: str, total: int, model: Path = model) -> None:
                progress(f"{model.name}: {what}", total * len(self.models))

            checks += check(setting, advance)
        return checks


def finished(path: Path, key: str) -> PartResult | None:
    """A part's earlier result, unless it was found on something else or its file is damaged."""
    try:
        result = PartResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if result.key == key else None


def keep(path: Path, result: PartResult) -> None:
    """Written beside and renamed: a killed run leaves a whole file or none."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def run(
    verification: Verification, parts: Sequence[str] = PARTS, console: Console | None = None
) -> list[PartResult]:
    """Results of ``parts``; those that the folder has already are not found again."""
    folder = verification.folder
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    with Bars(console=console or Console(stderr=True)) as bars:
        for part in parts:
            task = bars.add_task(part, total=None)
            key = verification.key(part)
            result = finished(folder / f"{part}.json", key)
            if result is None:
                start = time.monotonic()
                checks = verification.run_part(part, _advance(bars, task, part))
                seconds = time.monotonic() - start
                result = PartResult(part, key, seconds, tuple(checks))
                keep(folder / f"{part}.json", result)
            bars.update(task, total=1, completed=1, description=f"{part}: done")
            results.append(result)
    return results


def _advance(bars: Bars, task: TaskID, part: str) -> Progress:
    num_begun = -1

    def advance(what: str, total: int) -> None:
        nonlocal num_begun
        num_begun += 1
        bars.update(task, total=total, completed=num_begun, description=f"{part}: {what}")

    return advance
