"""The stages of `train-draft`, each resumed where it was killed and never done twice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sglang_ascend.files import write_json
from sglang_ascend.training import provenance
from sglang_ascend.training.acceptance import evaluate
from sglang_ascend.training.draft_model.start import DraftStart, given_model, some_layers
from sglang_ascend.training.draft_model.student import (
    Student,
    export_student,
    started_student,
    trained_student,
    untrained_student,
)
from sglang_ascend.training.loss import LossConfig
from sglang_ascend.training.pipeline.options import SharedOptions
from sglang_ascend.training.pipeline.replies import RepliesPipeline, Work
from sglang_ascend.training.pipeline.stages import Stage
from sglang_ascend.training.trainer import Trainer


@dataclass(frozen=True)
class DraftOptions(SharedOptions):
    """Of a draft model: one of the two is given."""

    draft: Path | None = None
    init_layers: int | None = None


class DraftPipeline(RepliesPipeline):
    """Of a separate model, which is written beside its target."""

    options: DraftOptions

    @cached_property
    def start(self) -> DraftStart:
        """Where training begins."""
        draft, num_layers = self.options.draft, self.options.init_layers
        if (draft is None) == (num_layers is None):
            raise ValueError(
                "a draft model begins as a small checkpoint or as layers of the target: pass "
                "either --draft FOLDER or --init-layers N."
            )
        if draft is not None:
            return given_model(self.target, draft)
        return some_layers(self.target, num_layers or 0)

    def _further(self) -> list[Work]:
        return [
            (lambda: self._training(self._max_steps()), self._train),
            (lambda: Stage("evaluate", again=True), self._evaluate),
            (lambda: Stage("export", again=True), self._export),
        ]

    def _loss(self) -> LossConfig:
        # Only through the target's own head do hidden states mean the same.
        hidden_weight = 0.0 if self.start.chosen is None else 1.0
        return LossConfig(1, kind=self.options.loss, hidden_weight=hidden_weight)

    def _training(self, max_steps: int | None) -> Stage:
        fixed = {
            **self._shared_training(),
            "--init-layers": self.options.init_layers,
            "--draft": self.options.draft and provenance.digest(self._draft_hashes),
        }
        _ = self.start  # refused before anything is computed
        return Stage("train", fixed, {"--max-steps": max_steps} if max_steps else {})

    @cached_property
    def _draft_hashes(self) -> dict[str, str]:
        """Of a given model's config and weights."""
        folder = self.start.folder
        return provenance.hashes([folder / "config.json", *sorted(folder.glob("*.safetensors"))])

    def _train(self) -> None:
        self.stages.check_files("generate", "text")
        device = self.target.device
        student = started_student(self.start, self.run_folder, device)
        embedding, own_head = self.start.embedding_and_head(device)
        _, head = self.target.embedding_and_head()
        config = self._train_config(self._max_steps())
        data, run = self.data, self.run_folder
        self._run(Trainer(student, embedding, head, data, run, config, self._loss(), own_head))

    def _evaluate(self) -> None:
        """Of the trained model, and of what it was before."""
        device, outputs = self.target.device, self._held_out_outputs()
        embedding, head = self.start.embedding_and_head(device)
        tokens = torch.arange(self.start.num_tokens)

        def figures(student: Student) -> dict[str, Any]:
            num_steps = self.options.num_steps
            return evaluate(student, outputs, embedding, head, num_steps, tokens, False)

        trained = figures(trained_student(self.start, self.run_folder, device))
        before = figures(untrained_student(self.start, device))
        write_json(self.out / "acceptance.json", {"trained": trained, "before": before})

    def _write_model(self, folder: Path) -> None:
        student = trained_student(self.start, self.run_folder, self.target.device)
        export_student(self.start, student, self.target.folder, folder)

    def _name(self) -> str:
        return f"draft model for {self.target.folder.resolve().name}"

    def _provenance(self, model: Path) -> dict[str, Any]:
        record = super()._provenance(model)
        if self.options.draft is not None:
            record["sha256"]["draft before training"] = self._draft_hashes
        return record
