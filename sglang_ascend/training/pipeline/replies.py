"""The stages that come before any training on a target's replies, each resumed where it was killed
and never done twice; what is trained says which stages follow."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sglang_ascend.bench.rounds import TASKS
from sglang_ascend.checkpoint.folder import model_files
from sglang_ascend.files import write_json
from sglang_ascend.training import provenance
from sglang_ascend.training.acceptance import Output
from sglang_ascend.training.generation.generate import generate_shards
from sglang_ascend.training.generation.generator import GenerateConfig
from sglang_ascend.training.generation.outputs import greedy_outputs, load_outputs, save_outputs
from sglang_ascend.training.generation.prompt_files import read_prompts
from sglang_ascend.training.generation.prompts import prompt_key
from sglang_ascend.training.generation.text import write_text_shards
from sglang_ascend.training.loss import LossConfig
from sglang_ascend.training.pipeline.options import SharedOptions
from sglang_ascend.training.pipeline.plots import acceptance_plot, loss_plot
from sglang_ascend.training.pipeline.stages import Stage, Stages
from sglang_ascend.training.pipeline.watch import FILE_NAME as ACCEPTANCE_LOG
from sglang_ascend.training.pipeline.watch import Watch
from sglang_ascend.training.run_folder import CHECKPOINT
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.trainer import TrainConfig, Trainer
from sglang_ascend.training.vocabulary.sources import check_readable, parse_sources

HELD_OUT, PROVENANCE = "held-out.safetensors", "provenance.json"
PASSES = 5  # over the sampled tokens, where --max-steps does not say
LOOKS = 20  # at the acceptance while it trains
HOLD_OUT_EVERY, MAX_HELD_OUT = 20, 40  # of the user's prompts, where --held-out names none
Work = tuple[Callable[[], Stage], Callable[[], object]]


class RepliesPipeline(ABC):
    """One folder `out`, from the target to `out`/model.

    Raises:
        CheckpointError: the target lacks something, or cannot be trained or served.
        ValueError: a file or an option cannot be used.
    """

    options: SharedOptions

    def __init__(
        self, folder: Path, out: Path, options: SharedOptions, say: Callable[[str], object]
    ) -> None:
        self.target = Target.open(
            folder, may_be_quantized=True, device=torch.device(options.device)
        )
        self.target.check_whole()
        self.out, self.options, self.say = out, options, say
        self.data, self.run_folder, self.model = out / "data", out / "run", out / "model"
        self.prompts, self.held_out = self._split_prompts()
        self.sources = parse_sources(list(options.text))
        check_readable(self.sources)
        self._loss()
        self.stages = Stages(out)
        if not self._written("train"):
            for name in ("generate", "text", "train"):
                if not self._written(name):
                    self.stages.forget(name)  # it kept nothing: other options spoil nothing
        self.stages.check([self._replies(), self._text(), self._training(options.max_steps)])

    @abstractmethod
    def _loss(self) -> LossConfig:
        """What is trained. Raises ValueError."""

    @abstractmethod
    def _training(self, max_steps: int | None) -> Stage:
        """The stage `train`, of as many optimizer steps."""

    @abstractmethod
    def _further(self) -> list[Work]:
        """What follows the replies, in order."""

    def _split_prompts(self) -> tuple[list[str] | None, list[dict[str, str]]]:
        """The prompts to train on, None for the templates', and those that are held out."""
        options = self.options
        rows = read_prompts(options.prompts) if options.prompts else None
        if options.held_out:
            held_out = read_prompts(options.held_out)
        elif rows is None:
            held_out = read_prompts(TASKS)
        elif len(rows) < 2:
            raise ValueError(f"{options.prompts} has one prompt: write more, or name --held-out.")
        else:
            held_out = rows[:: min(HOLD_OUT_EVERY, len(rows))][:MAX_HELD_OUT]
        apart = {prompt_key(row["prompt"]) for row in held_out}
        if rows is None:
            return None, held_out
        kept = [row["prompt"] for row in rows if prompt_key(row["prompt"]) not in apart]
        if not kept:
            raise ValueError(f"{options.prompts} holds no prompt that is not held out: write more.")
        return kept, held_out

    def run(self) -> dict[str, Any]:
        """Every stage that is not done; returns what `evaluate` found."""
        steps: list[Work] = [
            (self._held_out_replies, self._write_held_out),
            (self._replies, self._generate),
            *([(self._text, self._read_text)] if self.sources else []),
            *self._further(),
        ]
        for number, (stage_of, work) in enumerate(steps, start=1):
            stage = stage_of()
            self.stages.check([stage])
            done = self.stages.is_done(stage)
            self.say(f"{number}/{len(steps)} {stage.name}" + (": done before" if done else ""))
            if not done:
                self.stages.begin(stage)
                work()
                self.stages.finish(stage, self._written(stage.name))
            self.stages.pass_by(stage)
        return provenance.read_json(self.out / "acceptance.json")

    def _written(self, stage: str) -> list[Path]:
        """What stages behind `stage` go on from."""
        files = {
            "held-out replies": [self.out / HELD_OUT],
            "generate": sorted(self.data.glob("shard-*.safetensors")),
            "text": sorted(self.data.glob("text-*.safetensors")),
            "train": sorted(self.run_folder.glob(CHECKPOINT)),
            "export": sorted(self.model.iterdir()) if self.model.exists() else [],
        }
        return files.get(stage, [])

    @cached_property
    def target_hashes(self) -> dict[str, str]:
        return provenance.hashes(model_files(self.target.folder))

    def _source(self) -> dict[str, Any]:
        """What every stage depends on."""
        held_out = provenance.digest([row["prompt"] for row in self.held_out])
        return {"TARGET": provenance.digest(self.target_hashes), "--held-out": held_out}

    def _held_out_replies(self) -> Stage:
        fixed = {**self._source(), "--max-new-tokens": self.options.max_new_tokens}
        return Stage("held-out replies", fixed, again=True)

    def _replies(self) -> Stage:
        options = self.options
        fixed = {
            "--prompts": provenance.digest(self.prompts),  # before those held out of them
            **self._source(),
            "--temperature-mix": options.temperature_mix,
            "--own-share": options.own_share,
            "--max-length": options.max_length,
            "--max-new-tokens": options.max_new_tokens,
            "--seed": options.seed,
        }
        return Stage("generate", fixed, {"--tokens": options.tokens})

    def _text(self) -> Stage:
        files = [[source.path.name, source.sha256()] for source in self.sources]
        fixed = {
            "TARGET": provenance.digest(self.target_hashes),
            "--text": provenance.digest(files),
            "--max-length": self.options.max_length,
        }
        return Stage("text", fixed, {"--text-tokens": self.options.text_tokens})

    def _shared_training(self) -> dict[str, Any]:
        """Options of the stage `train`, whatever is trained."""
        options = self.options
        return {
            "--loss": options.loss,
            "--num-steps": options.num_steps,
            "--learning-rate": options.learning_rate,
            "--muon-rate": options.muon_rate,
            "--tokens-per-batch": options.tokens_per_batch,
            "--dtype": options.dtype,
        }

    def _max_steps(self) -> int:
        found = provenance.generated(self.data)
        tokens = found["sampled_tokens"] + found["text_tokens"]
        derived = max(20, PASSES * tokens // self.options.tokens_per_batch)
        # A shard that was damaged and made again may hold fewer tokens.
        return self.options.max_steps or max(derived, self.stages.recorded("train", "--max-steps"))

    def _write_held_out(self) -> None:
        outputs = greedy_outputs(self.target, self.held_out, self.options.max_new_tokens)
        save_outputs(self.out / HELD_OUT, outputs)

    def _held_out_outputs(self) -> list[Output]:
        return load_outputs(self.out / HELD_OUT)

    def _generate(self) -> None:
        options = self.options
        per_shard = min(128, max(4, options.tokens // 512))
        config = GenerateConfig(
            rows=min(96, 2 * per_shard),
            max_length=options.max_length,
            max_reply_tokens=options.max_new_tokens,
            own_prompt_share=options.own_share,
            reply_temperatures=options.temperature_mix,
            sequences_per_shard=per_shard,
            seed=options.seed,
            dtype=options.dtype,
        )
        excluded = {prompt_key(row["prompt"]) for row in self.held_out}
        tokens, prompts = options.tokens, self.prompts
        short = generate_shards(self.target, self.data, config, excluded, tokens, prompts)
        made = provenance.generated(self.data)["sampled_tokens"]
        too_long = short.too_long
        if too_long:
            too_long += " A larger --max-length, with a new --out, takes them."
            self.say(f"    {too_long}")
        if not made:
            raise ValueError(too_long or "no reply was worth keeping: give other --prompts.")
        if fewer := short.ran_dry or short.ran_out:
            self.say(f"    {fewer} It needs a new --out.")

    def _read_text(self) -> None:
        options = self.options
        length, tokens = options.max_length, options.text_tokens
        dtype = getattr(torch, options.dtype)
        held_out = {prompt_key(row["prompt"]) for row in self.held_out}
        write_text_shards(self.target, self.data, self.sources, length, tokens, dtype, held_out)

    def _train_config(self, steps: int, on_policy_steps: int = 0) -> TrainConfig:
        options = self.options
        return TrainConfig(
            max_steps=steps,
            on_policy_steps=on_policy_steps,
            tokens_per_batch=options.tokens_per_batch,
            learning_rate=options.learning_rate,
            muon_rate=options.muon_rate,
            warmup_steps=min(20, max(1, steps // 10)),
            checkpoint_steps=min(20, max(1, steps // LOOKS)),
            seed=options.seed,
            dtype=options.dtype,
        )

    def _run(self, trainer: Trainer) -> None:
        """To its end, watched, with plots of what was seen."""
        steps = trainer.config.max_steps
        num_steps = self.options.num_steps
        watch = Watch(trainer.layer, self._held_out_outputs(), num_steps, max(5, steps // LOOKS))
        trainer.run(watch)
        if trainer.began_at >= steps:
            self.say(f"    {steps} steps were taken before: nothing new is trained on without more")
        log = provenance.read_log(self.run_folder / "log.jsonl")
        looks = provenance.read_log(self.run_folder / ACCEPTANCE_LOG)
        (self.out / "loss.svg").write_text(loss_plot(log), encoding="utf-8")
        (self.out / "acceptance.svg").write_text(acceptance_plot(log, looks), encoding="utf-8")

    def _export(self) -> None:
        """What was not finished is begun anew; what is takes the old folder's place."""
        part = self.out / "model.part"
        shutil.rmtree(part, ignore_errors=True)  # left by a command that was killed
        self._write_model(part)
        (part / PROVENANCE).unlink(missing_ok=True)  # the target's
        write_json(part / PROVENANCE, self._provenance(part))
        shutil.rmtree(self.model, ignore_errors=True)
        part.rename(self.model)

    @abstractmethod
    def _write_model(self, folder: Path) -> None:
        """What is served, into a folder that is not there yet."""

    @abstractmethod
    def _name(self) -> str:
        """Of what was trained."""

    def _provenance(self, model: Path) -> dict[str, Any]:
        files = [self.options.prompts, self.options.held_out, *(s.path for s in self.sources)]
        return {
            "model": self._name(),
            **provenance.record(self.data, self.run_folder),
            "options": json.loads(json.dumps(asdict(self.options), default=str)),
            "acceptance": provenance.read_json(self.out / "acceptance.json"),
            "sha256": {
                "target": self.target_hashes,
                "prompts and text": provenance.hashes(path for path in files if path),
                "data": provenance.hashes(sorted(self.data.glob("*.safetensors"))),
                "model": provenance.hashes(sorted(model.iterdir())),
            },
        }
