"""The stages of `train-mtp`, each resumed where it was killed and never done twice."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.files import write_json
from sglang_ascend.speculative.vocabulary.file import FILE_NAME as VOCABULARY
from sglang_ascend.speculative.vocabulary.file import read_draft_vocabulary
from sglang_ascend.training.acceptance import evaluate
from sglang_ascend.training.export import export
from sglang_ascend.training.loss import LossConfig
from sglang_ascend.training.pipeline.options import Options
from sglang_ascend.training.pipeline.replies import RepliesPipeline, Work
from sglang_ascend.training.pipeline.stages import Stage
from sglang_ascend.training.targets.layer import MTPLayer
from sglang_ascend.training.targets.start import own_layer, started_layer, trained_layer
from sglang_ascend.training.trainer import Trainer
from sglang_ascend.training.vocabulary.draft_list import frequent_ids, write_draft_vocabulary

ROUND_SHARE = 4  # of the training are an on-policy round's steps


class Pipeline(RepliesPipeline):
    """Of an MTP layer, which is joined with its target."""

    options: Options

    def _further(self) -> list[Work]:
        return [
            (lambda: self._training(self._max_steps()), self._train),
            (self._draft_vocabulary, self._write_vocabulary),
            (lambda: Stage("evaluate", again=True), self._evaluate),
            (lambda: Stage("export", again=True), self._export),
        ]

    def _loss(self) -> LossConfig:
        options = self.options
        return LossConfig(options.num_steps, kind=options.loss, replay=options.replay)

    def _training(self, max_steps: int | None) -> Stage:
        options = self.options
        if not options.init and self.target.has_own_layer:  # refused before anything is computed
            self.target.check_own_layer()
        fixed = {
            **self._shared_training(),
            "--init": options.init,
            "--replay": options.replay,
        }
        grows = {"--on-policy-rounds": options.on_policy_rounds}
        return Stage("train", fixed, grows | ({"--max-steps": max_steps} if max_steps else {}))

    def _draft_vocabulary(self) -> Stage:
        return Stage("vocabulary", {"--vocabulary": self.options.vocabulary}, again=True)

    def _train(self) -> None:
        options, steps = self.options, self._max_steps()
        further = options.on_policy_rounds * max(1, steps // ROUND_SHARE)
        self.stages.check_files("generate", "text")
        layer = started_layer(
            self.target, self.data, self.run_folder, options.seed, from_scratch=options.init
        )
        config = self._train_config(steps + further, further)
        embedding, head = self.target.embedding_and_head()
        data, run = self.data, self.run_folder
        self._run(Trainer(layer, embedding, head, data, run, config, self._loss()))

    def _write_vocabulary(self) -> None:
        from transformers import AutoTokenizer

        (self.out / VOCABULARY).unlink(missing_ok=True)
        size, vocab_size = self.options.vocabulary, self.target.config.size("vocab_size")
        if not 0 < size < vocab_size:
            return
        special = AutoTokenizer.from_pretrained(self.target.folder).all_special_ids
        write_draft_vocabulary(self.out, frequent_ids(self.data, special, vocab_size, size))

    def _evaluate(self) -> None:
        """Of the trained layer, and of the target's own where it has one."""
        embedding, head = self.target.embedding_and_head()
        outputs = self._held_out_outputs()
        draft_ids = read_draft_vocabulary(self.out, len(head))

        def figures(layer: MTPLayer) -> dict[str, Any]:
            return evaluate(layer, outputs, embedding, head, self.options.num_steps, draft_ids)

        report = {"trained": figures(trained_layer(self.target, self.run_folder))}
        with suppress(CheckpointError):  # it has none, or a part of one, which --init leaves aside
            report["the target's own layer"] = figures(own_layer(self.target))
        write_json(self.out / "acceptance.json", report)

    def _write_model(self, folder: Path) -> None:
        export(self.target, trained_layer(self.target, self.run_folder), folder)
        if (self.out / VOCABULARY).exists():
            shutil.copyfile(self.out / VOCABULARY, folder / VOCABULARY)

    def _name(self) -> str:
        return f"MTP layer of {self.target.folder.resolve().name}"
