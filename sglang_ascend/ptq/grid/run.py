"""Scores every cell of the grid; each is a file when it is finished, so a killed run goes on."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.folder import model_files
from sglang_ascend.files import alone_in, part_of, replaced, write_json
from sglang_ascend.ptq.evaluate import Judge, Score
from sglang_ascend.ptq.grid.cells import Cell
from sglang_ascend.ptq.grid.sensitivity import sensitivity
from sglang_ascend.ptq.grid.solve import by_layer, matching, solve
from sglang_ascend.ptq.layers import Layers
from sglang_ascend.ptq.text import Text, own_text, read_texts, replies_to, write_texts
from sglang_ascend.ptq.weights import Weights
from sglang_ascend.training.targets.families import Target

TASK, CELLS, SENSITIVITY = "options.json", "cells", "sensitivity.json"
LOCK = "lock"
SENSITIVITY_TEXTS = 16


@dataclass(frozen=True)
class Options:
    """What decides the grid beside its cells, each by the name of its option."""

    against: Path
    prompts: tuple[Path, ...] = ()
    texts: int = 64
    max_new_tokens: int = 128
    num_steps: int = 3
    seed: int = 1_000_000
    include: str = "*"
    calibration_texts: int = 256
    calibration_seeds: int = 3

    @property
    def content(self) -> dict[str, Any]:
        """As JSON; a file stands for what it holds, a checkpoint for its files' sizes and times."""
        stats = [path.stat() for path in model_files(self.against)]
        return {
            **asdict(self),
            "against": [[stat.st_size, stat.st_mtime_ns] for stat in stats],
            "prompts": [hashlib.sha256(path.read_bytes()).hexdigest() for path in self.prompts],
        }

    def written_by(self, target: Target) -> list[Text]:
        """What all are judged by: greedy replies of the float model.

        Raises:
            CheckpointError: it has no tokenizer.
        """
        target.check_tokenizer()
        if not self.prompts:
            return own_text(target, self.seed, self.texts)
        return replies_to(target, list(self.prompts), self.max_new_tokens, self.texts)


@dataclass(frozen=True)
class Scored:
    """A cell by one seed of the calibration text, None where it reads none."""

    cell: Cell
    seed: int | None
    num_bytes: int
    seconds: float
    scores: list[Score]


class Grid:
    """The cells of one set of options, in the folder `out`.

    Raises:
        CheckpointError: the model is refused, no linear matches, or `out` holds something else.
        ValueError: another process is at work there.
    """

    def __init__(self, options: Options, cells: Sequence[Cell], out: Path) -> None:
        self.options, self.folder = options, out
        self.target = Target.open(options.against)
        self.layers = Layers(self.target, Weights(options.against))
        matching(self.layers, options.include)
        seeds = range(options.calibration_seeds)
        self.runs = [(c, seed) for c in cells for seed in (seeds if c.calibrated else [None])]
        self._claim()
        self._judge: Judge | None = None
        self._calibration: dict[int, list[Tensor]] = {}

    def _claim(self) -> None:
        """Makes the folder, or checks that its options are these."""
        content = json.loads(json.dumps(self.options.content))
        path = self.folder / TASK
        there = set(self.folder.iterdir()) if self.folder.exists() else set[Path]()
        if path not in there and there - {part_of(path), self.folder / LOCK}:
            raise CheckpointError(
                f"--grid {shown(self.folder)} holds something else; name a new folder"
            )
        with alone_in(self.folder, LOCK, "--grid"):
            if not path.exists():
                write_json(path, content)
            (self.folder / CELLS).mkdir(exist_ok=True)
        held = _read(path)
        if others := [name for name in content if held.get(name) != content[name]]:
            options = ", ".join("--" + name.replace("_", "-") for name in others)
            raise CheckpointError(
                f"--grid {shown(self.folder)} holds cells by another {options}; name a new folder, "
                "or delete that one to begin anew"
            )

    def run(self, progress: Callable[[str], object] = lambda cell: None) -> list[Scored]:
        """Every cell by every seed; what is finished in the folder is not computed again."""
        found = []
        for cell, seed in self.runs:
            found.append(self._finished(cell, seed) or self._score(cell, seed))
            progress(cell.name)
        return found

    def sensitivity(self) -> Mapping[str, Mapping[str, float]]:
        """Of every linear, on the first of the texts that all are judged by."""
        path = self.folder / SENSITIVITY
        if not path.exists():
            tokens = [text.tokens for text in self._judged()[:SENSITIVITY_TEXTS]]
            wanted = by_layer(self.layers, matching(self.layers, "*"))
            found = sensitivity(self.layers, tokens, wanted)
            write_json(path, found)
        return _read(path)

    def _judged(self) -> list[Text]:
        return self._kept("judged", lambda: self.options.written_by(self.target))

    def _kept(self, name: str, write: Callable[[], list[Text]]) -> list[Text]:
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            texts = write()
            with replaced(path) as part:
                write_texts(part, texts)
        return read_texts(path)

    def _tokens(self, seed: int | None) -> list[Tensor]:
        """Of the calibration text of `seed`."""
        if seed is None:
            return []
        if seed not in self._calibration:
            count = self.options.calibration_texts
            texts = self._kept(f"calibration-{seed}", lambda: own_text(self.target, seed, count))
            self._calibration[seed] = [text.tokens for text in texts]
        return self._calibration[seed]

    def _path(self, cell: Cell, seed: int | None) -> Path:
        suffix = "" if seed is None else f" {seed}"
        return self.folder / CELLS / f"{cell.name}{suffix}.json"

    def _finished(self, cell: Cell, seed: int | None) -> Scored | None:
        path = self._path(cell, seed)
        if not path.exists():
            return None
        content = _read(path)
        if content["cell"] != cell.description:
            return None
        scores = [Score(**row) for row in content["scores"]]
        return Scored(cell, seed, content["bytes"], content["seconds"], scores)

    def _score(self, cell: Cell, seed: int | None) -> Scored:
        if self._judge is None:
            self._judge = Judge(self.options.against, self._judged(), self.options.num_steps)
        tokens, started = self._tokens(seed), time.perf_counter()
        solved = solve(self.layers, cell, self.options.include, tokens)
        judged = self._judge.score(Path(cell.name), solved)
        content = {
            "cell": cell.description,
            "bytes": judged.num_bytes,
            "seconds": time.perf_counter() - started,
            "scores": [asdict(score) for score in judged.scores],
        }
        write_json(self._path(cell, seed), content)
        return Scored(cell, seed, judged.num_bytes, content["seconds"], judged.scores)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise CheckpointError(f"{shown(path)} is no JSON; delete it") from None
