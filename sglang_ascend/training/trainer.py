"""The training loop of an MTP layer on a frozen target: batches, optimizer, average, resume."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from sglang_ascend.files import replaced
from sglang_ascend.quantization.writers.saving import save_tensors
from sglang_ascend.training.data import (
    Sequence,
    collate,
    drafted_batches,
    frequent_tokens,
    load_shards,
    shard_paths,
)
from sglang_ascend.training.generation.shards import TARGET, read_metadata
from sglang_ascend.training.interface import in_dtype, run_chain
from sglang_ascend.training.loss import LossConfig, chain_loss
from sglang_ascend.training.muon import optimizers_of
from sglang_ascend.training.run_folder import CHECKPOINT, below, opened_checkpoint

Tensor = torch.Tensor


@dataclass(frozen=True)
class TrainConfig:
    """How to train. A pass goes once over the shards that lie in the data folder as it begins."""

    max_steps: int = 1000
    tokens_per_batch: int = 2048
    learning_rate: float = 2e-3
    muon_rate: float = 0.02  # of the matrices, by Muon; 0 gives them to AdamW too
    norm_rate_factor: float = 3.0  # the norms' few weights travel far from their start
    warmup_steps: int = 20
    decay_share: float = 0.3
    weight_decay: float = 0.01
    average_decay: float = 0.98
    loss_vocabulary: int = 4096
    on_policy_steps: int = 0  # the last ones of `max_steps`
    checkpoint_steps: int = 20
    seed: int = 0
    # Of products and activations; weights, averages, optimizer and softmax stay float32. With
    # "float32" a resumed run ends in the same weights, bit by bit, as one that was never stopped.
    dtype: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class Trainer:
    """Trains `layer` on shards; every state it needs to go on lies in its checkpoint folder.

    `head` is the target's, and that of the drafts too unless they have a `draft_head`. None of them
    is trained, nor is `embedding`. It computes where they lie. Shards, the log and the checkpoint
    are the CPU's, and a checkpoint goes on on any device.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        embedding: Tensor,
        head: Tensor,
        data: Path,
        out: Path,
        config: TrainConfig,
        loss: LossConfig,
        draft_head: Tensor | None = None,
    ) -> None:
        self.config, self.loss = config, loss
        self.dtype = config.torch_dtype
        self.layer, self.worker = layer, in_dtype(layer, self.dtype)
        self.device = embedding.device
        self.embedding, self.head = embedding.to(self.dtype), head.to(self.dtype)
        self.draft_head = self.head if draft_head is None else draft_head.to(self.dtype)
        self.data, self.out = data, out
        rate, decay = config.learning_rate, config.weight_decay
        self.optimizers = optimizers_of(
            layer, rate, rate * config.norm_rate_factor, config.muon_rate, decay, self.dtype
        )
        self.average = {name: value.detach().clone() for name, value in layer.named_parameters()}
        self.step = self.pass_number = self.batch_number = 0
        self.shards: list[str] = []
        out.mkdir(parents=True, exist_ok=True)

    def run(self, watch: Callable[[Trainer], str] = lambda trainer: "") -> None:
        """Trains to `max_steps`, from the checkpoint in the folder if there is one.

        `watch` is called after each checkpoint; what it says stands beside the bar.
        """
        present = self._present_shards()
        if self._restore() and set(self.shards) <= set(present):
            self._begin_pass(self.shards)
        else:  # at the start, or where a shard of the pass was damaged and made again
            self.batch_number = 0
            self._begin_pass(present)
        said, self.began_at = "", self.step
        with tqdm(desc="train", total=self.config.max_steps, initial=self.step, unit="step") as bar:
            while self.step < self.config.max_steps:
                if self.batch_number >= len(self.batches):
                    self.pass_number, self.batch_number = self.pass_number + 1, 0
                    self._begin_pass(self._present_shards())
                losses, num_rows = self._train_step()
                shown = "loss " + " ".join(f"{value:.3f}" for value in losses)
                bar.set_postfix_str(f"{shown} {said}")
                bar.update()
                self._log(losses, num_rows)
                if self.step % self.config.checkpoint_steps == 0:
                    self._save()
                    said = watch(self)
        if self.step > self.began_at:
            self._save()
        watch(self)

    def _present_shards(self) -> list[str]:
        return [path.name for path in shard_paths(self.data)]

    def _begin_pass(self, shards: list[str]) -> None:
        if shards != self.shards or not hasattr(self, "sequences"):
            own = [self.data / name for name in self._own(shards)]
            self.sequences: list[Sequence] = load_shards(own, self.head.shape[1])
        self.shards, self.num_sequences = shards, len(self.sequences)
        seed = self.config.seed * 1000 + self.pass_number
        size, steps = self.config.tokens_per_batch, self.loss.num_steps
        self.batches = drafted_batches(self.sequences, size, seed, steps)
        # Rows behind the last token are padding, of which each head may have a number of its own.
        count = self.config.loss_vocabulary
        vocab_size = min(len(self.head), len(self.draft_head))
        self.frequent = frequent_tokens(self.sequences, count, vocab_size).to(self.device)

    def _own(self, shards: list[str]) -> list[str]:
        """Those of a pass's shards that this process trains on."""
        return shards

    def _joined(self, vocabulary: Tensor) -> Tensor:
        """The ids of the softmax of one step, of every process that takes part."""
        return vocabulary

    def _batch(self) -> tuple[Tensor, Tensor, tuple]:
        """Of the next batch what `collate` makes of it."""
        batch = [self.sequences[i] for i in self.batches[self.batch_number]]
        return collate(batch, self.loss.num_steps, self.dtype, self.device)

    def _train_step(self) -> tuple[list[float], int]:
        tokens, hidden, rows = self._batch()
        labels = tokens[rows[0], rows[1] + 1]
        vocabulary = self._joined(torch.cat([self.frequent, labels]).unique())
        heads = self.head[vocabulary], self.draft_head[vocabulary]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * self._rate()
        self._lend_weights()
        outputs = run_chain(self.worker, hidden, tokens, self.embedding, self.loss.num_steps)
        on_policy = self.step >= self.config.max_steps - self.config.on_policy_steps
        total, losses = chain_loss(
            outputs, hidden, tokens, rows, heads, vocabulary, self.loss, on_policy
        )
        total.backward()
        self._return_gradients(len(rows[0]))
        torch.nn.utils.clip_grad_norm_(self.layer.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step, self.batch_number = self.step + 1, self.batch_number + 1
        decay = min(self.config.average_decay, self.step / (self.step + 10))
        for name, value in self.layer.named_parameters():
            self.average[name].lerp_(value.detach(), 1 - decay)
        return losses, len(rows[0])

    @torch.no_grad()
    def _lend_weights(self) -> None:
        """Gives the layer that computes the float32 weights as they are now."""
        if self.worker is not self.layer:
            for worker, own in self._pairs():
                worker.copy_(own)

    def _return_gradients(self, num_rows: int) -> None:
        """Puts the gradients of the mean over `num_rows` rows where the optimizers look."""
        if self.worker is not self.layer:
            for worker, own in self._pairs():
                own.grad = None if worker.grad is None else worker.grad.float()
                worker.grad = None

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.worker.parameters(), self.layer.parameters(), strict=True)

    def _rate(self) -> float:
        """Linear warm-up, constant, then linear to zero over the last `decay_share` of the steps:
        a run can be prolonged by a larger `max_steps` without having decayed too early."""
        config = self.config
        warmup = (self.step + 1) / config.warmup_steps
        decay = (config.max_steps - self.step) / max(1, config.decay_share * config.max_steps)
        return min(1.0, warmup, decay)

    def _log(self, losses: list[float], num_rows: int) -> None:
        line = {
            "step": self.step,
            "pass": self.pass_number,
            "sequences": self.num_sequences,
            "rows": num_rows,
            "losses": [round(value, 4) for value in losses],
            "time": round(time.time(), 1),
        }
        with (self.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def _save(self) -> None:
        """Writes everything to one safetensors file, atomically."""
        state = self.layer.state_dict()  # the parameters and, as they are, the buffers
        tensors = {f"layer.{k}": v for k, v in state.items()}
        tensors |= {f"average.{k}": self.average.get(k, v.clone()) for k, v in state.items()}
        for name, parameter in self.layer.named_parameters():
            for key, value in self._state_of(parameter).items():
                tensors[f"optimizer.{name}.{key}"] = value
        progress = {
            "step": self.step,
            "pass_number": self.pass_number,
            "batch_number": self.batch_number,
            "shards": self.shards,
            "target": self._target(),
            "device": str(self.device),
            "config": asdict(self.config),
            "loss": asdict(self.loss),
        }
        tensors = {name: value.cpu() for name, value in tensors.items()}
        with replaced(self.out / CHECKPOINT) as part:
            save_tensors(tensors, part, {"progress": json.dumps(progress)})

    def _target(self) -> str | None:
        """The fingerprint of what wrote the shards, where they say it."""
        return read_metadata(self.data / self.shards[0]).get(TARGET) if self.shards else None

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The mutable state that this parameter's optimizer keeps of it."""
        for optimizer in self.optimizers:
            if any(parameter is p for group in optimizer.param_groups for p in group["params"]):
                return optimizer.state[parameter]
        raise KeyError("parameter without optimizer")

    def _restore(self) -> bool:
        path = self.out / CHECKPOINT
        if not path.exists():
            return False
        with opened_checkpoint(self.out) as file:
            progress = json.loads(file.metadata()["progress"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        self._refuse_other(path, below("layer.", tensors), progress["config"])
        self.layer.load_state_dict(below("layer.", tensors))
        for name, parameter in self.layer.named_parameters():
            self.average[name].copy_(tensors[f"average.{name}"])
            for key, value in below(f"optimizer.{name}.", tensors).items():
                # torch's optimizers count their steps on the CPU.
                kept = value if value.dim() == 0 else value.to(self.device)
                self._state_of(parameter)[key] = kept
        for name in ("step", "pass_number", "batch_number", "shards"):
            setattr(self, name, progress[name])
        return True

    def _refuse_other(self, path: Path, weights: dict[str, Tensor], config: dict) -> None:
        """Refuses a checkpoint whose weights or optimizer states are none of this training's."""
        state = self.layer.state_dict()
        if {n: w.shape for n, w in weights.items()} != {n: w.shape for n, w in state.items()}:
            raise ValueError(f"{path} is of a layer of another model: name another --out.")
        before, rate = config["muon_rate"], self.config.muon_rate
        if bool(before) != bool(rate):
            raise ValueError(
                f"--muon-rate is {rate} and was {before} when {path} was written, which holds the "
                "states of another optimizer: keep it as it was, or name another --out."
            )
