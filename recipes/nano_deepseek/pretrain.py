"""Owns the pretraining of nano-deepseek's target: batches, loop, resume, validation.

A step's batch depends on (seed, step) alone, so a resumed run sees what an unbroken one would.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from recipes.nano_deepseek.config import NanoConfig
from recipes.nano_deepseek.experts import MixtureOfExperts
from recipes.nano_deepseek.model import DeepseekForCausalLM
from recipes.nano_deepseek.text.tokenizer import ASSISTANT_ID, BOS_ID, USER_ID
from sglang_ascend.files import replaced, write_json
from sglang_ascend.training.muon import Muon

logger = logging.getLogger(__name__)

# Shares of the training windows. Maths and chat come first: greedy answers should be real ones.
MIX = {
    "maths": 0.34,
    "chat": 0.26,
    "austen": 0.08,
    "factbook": 0.06,
    "wordnet": 0.04,
    "python_docs": 0.06,
    "python_code": 0.07,
    "diagnostics": 0.05,
    "translations": 0.02,
    "declaration": 0.02,
}
CONVERSATIONS = ("maths", "chat")
# A drawn question cannot be predicted; its tokens would drown the answer's gradient.
QUESTION_WEIGHT = 0.2
MUON_LR, ADAM_LR = 0.02, 3e-3
BALANCE_RATE = 0.005
WARMUP_STEPS, DECAY_SHARE = 20, 0.6
SAVE_EVERY = 100


@dataclass(frozen=True)
class Shape:
    """Windows of one batch; the long ones teach positions that the short ones never reach."""

    rows: int
    length: int


SHORT, LONG, LONG_ONE_IN = Shape(8, 256), Shape(2, 1024), 6


class Corpus:
    """The encoded parts of one split and the places where their documents start."""

    def __init__(self, folder: Path, split: str) -> None:
        self.tokens = {part: np.load(folder / f"{part}.{split}.npy") for part in MIX}
        self.starts = {part: np.flatnonzero(t == BOS_ID) for part, t in self.tokens.items()}

    def window(self, part: str, length: int, rng: np.random.Generator) -> np.ndarray:
        """`length` + 1 tokens: from a document's start for conversations, from anywhere else."""
        tokens = self.tokens[part]
        last = len(tokens) - length - 1
        start = rng.choice(self.starts[part]) if part in CONVERSATIONS else rng.integers(0, last)
        start = max(0, min(int(start), last))
        return tokens[start : start + length + 1].astype(np.int64)

    def batch(self, step: int, seed: int) -> Tensor:
        """The windows of step `step`, int64 [rows, length + 1]."""
        rng = np.random.default_rng((seed, step))
        shape = LONG if step % LONG_ONE_IN == LONG_ONE_IN - 1 else SHORT
        parts = rng.choice(list(MIX), shape.rows, p=list(MIX.values()))
        return torch.from_numpy(np.stack([self.window(p, shape.length, rng) for p in parts]))


def loss_weights(ids: Tensor) -> Tensor:
    """Weights of the targets ids[:, 1:]: lower inside questions; [rows, length]."""
    place = torch.arange(ids.shape[1]).expand_as(ids)
    last_user = torch.where(ids == USER_ID, place, -1).cummax(1).values
    last_answer = torch.where(ids == ASSISTANT_ID, place, -1).cummax(1).values
    asking = (last_user > last_answer)[:, 1:]
    return torch.where(asking, QUESTION_WEIGHT, 1.0)


def build_optimizers(
    model: nn.Module, muon_lr: float, adam_lr: float
) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the weight matrices; AdamW for embedding, head, router and norms."""
    matrices, others = [], []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        by_adam = param.dim() < 2 or any(k in name for k in ("embed_tokens", "lm_head", "gate.w"))
        (others if by_adam else matrices).append(param)
    return (
        Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    )


def learning_rate_factor(step: int, steps: int) -> float:
    """Short warm-up, flat, then linear to zero over the last `DECAY_SHARE`."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (1 - step / steps) / DECAY_SHARE)


def balance_experts(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.gate.balance(module.load, BALANCE_RATE)


@torch.no_grad()
def validate(model: DeepseekForCausalLM, corpus: Corpus, windows: int = 8) -> dict[str, float]:
    """Nats per target token of each part, with the training weights."""
    losses = {}
    for part in MIX:
        rng = np.random.default_rng(0)
        length = min(SHORT.length, len(corpus.tokens[part]) - 2)
        ids = torch.from_numpy(np.stack([corpus.window(part, length, rng) for _ in range(windows)]))
        losses[part] = round(weighted_loss(model, ids).item(), 3)
    return losses


def weighted_loss(model: DeepseekForCausalLM, ids: Tensor) -> Tensor:
    """Cross entropy of ids [rows, length + 1] under `loss_weights`."""
    logits = model(ids[:, :-1])
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = loss_weights(ids).flatten()
    return (each * weights).sum() / weights.sum()


def _optimizer_tensors(optimizers: tuple) -> Iterator[tuple[dict, str, str]]:
    for number, optimizer in enumerate(optimizers):
        for index, param in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            for key in optimizer.state[param]:
                yield optimizer.state[param], key, f"optimizer.{number}.{index}.{key}"


def save_progress(folder: Path, step: int, model: nn.Module, optimizers: tuple) -> None:
    """Write weights and optimizer state after `step` steps, replacing the last state at once."""
    tensors = {f"model.{k}": v.contiguous() for k, v in model.state_dict().items()}
    for state, key, name in _optimizer_tensors(optimizers):
        tensors[name] = state[key].contiguous()
    with replaced(folder / "progress.safetensors") as part:
        save_file(tensors, part, metadata={"step": str(step)})


def load_progress(folder: Path, model: nn.Module, optimizers: tuple) -> int:
    """Restore what `save_progress` wrote, if it is there; return the number of steps done."""
    path = folder / "progress.safetensors"
    if not path.exists():
        return 0
    tensors = load_file(path)
    model.load_state_dict(
        {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    )
    for number, optimizer in enumerate(optimizers):
        for index, param in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            prefix = f"optimizer.{number}.{index}."
            for name in [n for n in tensors if n.startswith(prefix)]:
                optimizer.state[param][name.removeprefix(prefix)] = tensors[name]
    with safe_open(path, "pt") as file:
        return int(file.metadata()["step"])


def pretrain(corpus_folder: Path, out: Path, steps: int, seed: int) -> dict:
    """Train for `steps` steps in all, resuming what `out` holds; return the log."""
    torch.manual_seed(seed)
    train, held = Corpus(corpus_folder, "train"), Corpus(corpus_folder, "val")
    model = DeepseekForCausalLM(NanoConfig())
    optimizers = build_optimizers(model, MUON_LR, ADAM_LR)
    out.mkdir(parents=True, exist_ok=True)
    done = load_progress(out, model, optimizers)
    log: dict = {"seed": seed, "steps": steps}
    progress = tqdm(range(done, steps), initial=done, total=steps, desc="pretrain", mininterval=5)
    average = 0.0
    for step in progress:
        factor = learning_rate_factor(step, steps)
        for optimizer, lr in zip(optimizers, (MUON_LR, ADAM_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
        loss = weighted_loss(model, train.batch(step, seed))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        balance_experts(model)
        average = loss.item() if step == done else 0.95 * average + 0.05 * loss.item()
        progress.set_postfix(loss=f"{average:.3f}")
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            log |= {"steps_done": step + 1, "tokens": (step + 1) * SHORT.rows * SHORT.length}
            log |= {"training_loss": round(average, 3), "validation": validate(model, held)}
            save_progress(out, step + 1, model, optimizers)
            write_json(out / "pretrain.json", log)
            logger.info("step %d: %s", step + 1, log)
    return log


def main(
    corpus: Annotated[Path, typer.Option(help="Folder encoded by text.tokenizer.")],
    out: Annotated[Path, typer.Option(help="Where progress.safetensors and pretrain.json go.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps of 2,048 tokens.")] = 1400,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Pretrain nano-deepseek's target; run again to resume."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(threads)
    typer.echo(json.dumps(pretrain(corpus, out, steps, seed)))


if __name__ == "__main__":
    typer.run(main)
