"""The package's trainer on conversations that lie on the device, for as long as one is given."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from recipes.smollm2_mtp.card.store import Store
from sglang_ascend.training.data import most_frequent, pass_order, trained_rows
from sglang_ascend.training.loss import LossConfig
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.layer import MTPLayer
from sglang_ascend.training.trainer import TrainConfig, Trainer

Tensor = torch.Tensor
LOOKS = 4  # at the layer, the last one at the end


class CardTrainer(Trainer):
    """Takes its batches of `store`, but for its last `left_out` conversations, for `seconds`: a
    card is lent by the minute, and what a step takes is known once the first hundreds are done."""

    def __init__(
        self,
        target: Target,
        layer: MTPLayer,
        store: Store,
        left_out: int,
        out: Path,
        config: TrainConfig,
        seconds: float,
    ) -> None:
        # On-policy steps are the last of so many.
        config = replace(config, max_steps=sys.maxsize)
        super().__init__(layer, *target.embedding_and_head(), out, out, config, LossConfig())
        self.store, self.lengths = store, store.lengths[: len(store.lengths) - left_out]
        self.seconds = seconds

    @property
    def progress(self) -> float:
        """The share of the time that is over."""
        return (time.monotonic() - self.began) / self.seconds

    def run(self, watch: Callable[[Trainer], str] = lambda trainer: "") -> None:
        """Trains until the time is over; `watch` is called after each quarter of it."""
        self._begin_pass([])
        self.began, looks = time.monotonic(), 1
        with tqdm(desc="train", unit="step", mininterval=5) as bar:
            while self.progress < 1:
                if self.batch_number >= len(self.batches):
                    self.pass_number, self.batch_number = self.pass_number + 1, 0
                    self._begin_pass([])
                losses, num_rows = self._train_step()
                self._log(losses, num_rows)
                bar.update()
                if self.progress > looks / LOOKS:
                    looks += 1
                    watch(self)
        if looks <= LOOKS:
            watch(self)

    def _begin_pass(self, shards: list[str]) -> None:
        config, vocab_size = self.config, len(self.head)
        seed = config.seed * 1000 + self.pass_number
        self.num_sequences = len(self.lengths)
        self.batches = pass_order(self.lengths, config.tokens_per_batch, seed)
        totals = torch.bincount(self.store.tokens[: self.store.used], minlength=vocab_size)
        self.frequent = most_frequent(totals, config.loss_vocabulary)

    def _batch(self) -> tuple[Tensor, Tensor, tuple]:
        tokens, trained, hidden = self.store.padded(self.batches[self.batch_number])
        return tokens, hidden.to(self.dtype), trained_rows(trained, self.loss.num_steps)

    def _rate(self) -> float:
        """As a `Trainer`'s, by time."""
        decay = max(0.0, 1 - self.progress) / max(1e-6, self.config.decay_share)
        return min(1.0, (self.step + 1) / self.config.warmup_steps, decay)
