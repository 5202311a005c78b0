"""Owns nano-deepseek's NextN training command: the shared trainer with an untied embedding."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from sglang_ascend.training.loss import LossConfig
from sglang_ascend.training.nano_checkpoint import load_checkpoint
from sglang_ascend.training.nano_config import NanoConfig
from sglang_ascend.training.nano_nextn import NextNLayer
from sglang_ascend.training.trainer import TrainConfig, Trainer


def new_layer(config: NanoConfig, target_norm: torch.Tensor, seed: int) -> NextNLayer:
    """A fresh layer: its blocks start silent, its last norm as the target's."""
    torch.manual_seed(seed)
    layer = NextNLayer(config)
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.shared_head.norm.weight.copy_(target_norm)
    return layer


def main(
    target: Annotated[Path, typer.Option(help="Checkpoint folder of the trained target.")],
    data: Annotated[Path, typer.Option(help="Folder written by training.nano_generate.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoint and log; resumed.")],
    max_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps in all.")] = 300,
    learning_rate: Annotated[float, typer.Option(help="Peak rate of AdamW.")] = 3e-3,
    tokens_per_batch: Annotated[int, typer.Option(min=64, help="Padded tokens a batch.")] = 2048,
    seed: int = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Train the NextN layer on the frozen target's own text; run again to resume."""
    torch.set_num_threads(threads)
    model, _ = load_checkpoint(target)
    model.requires_grad_(False)
    layer = new_layer(model.config, model.model.norm.weight, seed)
    config = TrainConfig(
        max_steps=max_steps,
        learning_rate=learning_rate,
        tokens_per_batch=tokens_per_batch,
        loss_vocabulary=model.config.vocab_size,
        average_decay=0.95,
        seed=seed,
    )
    loss = LossConfig(num_steps=3, hard_weight=0.0, soft_weight=1.0, hidden_weight=0.0)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    Trainer(layer, embedding, head, data, out, config, loss).run()


if __name__ == "__main__":
    typer.run(main)
