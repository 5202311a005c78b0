"""The parts in order; a finished one is kept in the folder, so that a killed run goes on."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import TaskID

from sglang_ascend.files import write_json
from sglang_ascend.verify.checks import Check, PartResult, Progress, sentence_of
from sglang_ascend.verify.machine import Machine
from sglang_ascend.verify.operators.against_reference import check_operators
from sglang_ascend.verify.operators.speed import time_operators
from sglang_ascend.verify.operators.synchronisation import check_synchronisation
from sglang_ascend.verify.serving import Setting, check_serving
from sglang_ascend.verify.serving_waits import check_waits

PARTS = ("operators", "synchronisation", "operator-speed", "serving", "serving-waits")
PACKAGE = Path(__file__).parents[1]
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
        models = [(str(model), _state_of(model)) for model in self.models]
        settings = {
            "operator-speed": [self.rounds],
            "serving": [self.rounds, models],
            "serving-waits": models,
        }
        described = [self.machine.label, self.machine.facts, _state_of(PACKAGE), settings.get(part)]
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
        for model, name in zip(self.models, distinct_names(self.models), strict=True):
            setting = Setting(model, self.machine.device, self.folder, self.rounds, name)

            def advance(what: str, total: int, name: str = name) -> None:
                progress(f"{name}: {what}", total * len(self.models))

            checks += check(setting, advance)
        return checks


def distinct_names(models: Sequence[Path]) -> list[str]:
    """By which results and logs are told apart; of two folders ``model`` the second is model-2."""
    seen, names = Counter[str](), []
    for name in (model.resolve().name for model in models):
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def _state_of(folder: Path) -> list[tuple[str, int, int]]:
    """Changes where a file in it does, code or weights."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    states = [(str(path.relative_to(folder)), path.stat()) for path in files]
    return [(name, s.st_size, s.st_mtime_ns) for name, s in states if "__pycache__" not in name]


def finished(path: Path, key: str) -> PartResult | None:
    """A part's earlier result, unless it failed, was found on something else, or its file is
    damaged."""
    try:
        result = PartResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if result.failures or result.key != key else result


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
                try:
                    checks = verification.run_part(part, _advance(bars, task, part))
                except Exception as error:  # of none of its checks; the other parts have theirs
                    checks = [Check(part, False, note=sentence_of(error))]
                seconds = time.monotonic() - start
                result = PartResult(part, key, seconds, tuple(checks))
                write_json(folder / f"{part}.json", result.to_json())
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
