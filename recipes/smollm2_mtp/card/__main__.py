"""The recipe on one GPU, in minutes: the target writes, the layer learns from what it wrote."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer

from recipes.smollm2_mtp.card.trainer import CardTrainer
from recipes.smollm2_mtp.card.write import check, write
from sglang_ascend.training.export import export_layer
from sglang_ascend.training.generation.generator import GenerateConfig
from sglang_ascend.training.generation.prompt_files import keys_of
from sglang_ascend.training.targets.device import compute_device
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import own_layer
from sglang_ascend.training.trainer import TrainConfig, Trainer
from sglang_ascend.training.vocabulary.draft_list import listed_ids, write_draft_vocabulary


def main(
    folder: Annotated[Path, typer.Option("--target", help="Checkpoint whose layer it starts at.")],
    prompts: Annotated[Path, typer.Option(help="What `recipes.smollm2_mtp.card.prompts` wrote.")],
    exclude: Annotated[list[Path], typer.Option(help="Evaluation prompts; repeatable.")],
    out: Annotated[Path, typer.Option(help="New folder for layers, log and left-out replies.")],
    rows: Annotated[int, typer.Option(min=2, help="Conversations at once.")] = 4096,
    tokens: Annotated[int, typer.Option(help="Tokens to keep, prompts too.")] = 32_000_000,
    own_share: Annotated[float, typer.Option(help="Of user turns that the model writes.")] = 0.3,
    write_seconds: Annotated[float, typer.Option(help="Longest time to write.")] = 240,
    train_seconds: Annotated[float, typer.Option(help="How long to train.")] = 300,
    tokens_per_batch: Annotated[int, typer.Option(help="Padded tokens a step.")] = 16_384,
    learning_rate: Annotated[float, typer.Option(help="Peak rate of AdamW.")] = 1e-3,
    muon_rate: Annotated[float, typer.Option(help="Peak rate of Muon.")] = 0.01,
    loss_vocabulary: Annotated[int, typer.Option(help="Of the softmax, beside labels.")] = 8192,
    list_size: Annotated[int, typer.Option(help="Tokens that drafts may be.")] = 3072,
    left_out: Annotated[int, typer.Option(help="Conversations, the last, not trained on.")] = 512,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of replies and batches.")] = 0,
) -> None:
    """Write conversations, then train; `out` receives the layer after each quarter of the time.

    Beside it lies the list of draft tokens: those that the target wrote most.
    """
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    target = Target.open(folder, device=compute_device(device))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generate = GenerateConfig(rows=rows, seed=seed, own_prompt_share=own_share)
    store = write(target, tokenizer, prompts, generate, tokens, write_seconds)
    counts = store.counts(target.config.size("vocab_size"))
    report = {
        "write_seconds": round(time.monotonic() - began, 1),
        "not_distinct": store.drop(keys_of(exclude), tokenizer.decode),
        "distance": round(check(target, store), 4),
        "conversations": len(store.starts),
        "stored_tokens": store.used,
        "sampled_tokens": int(counts.sum()),
    }
    typer.echo(json.dumps(report))
    store.save(len(store.starts) - left_out, out / "left_out.safetensors")
    write_draft_vocabulary(out, listed_ids(counts, tokenizer.all_special_ids, list_size))
    config = TrainConfig(
        tokens_per_batch=tokens_per_batch,
        learning_rate=learning_rate,
        muon_rate=muon_rate,
        decay_share=0.8,
        average_decay=0.99,
        loss_vocabulary=loss_vocabulary,
        seed=seed,
        dtype="bfloat16",
    )
    layer = own_layer(target)
    trainer = CardTrainer(target, layer, store, left_out, out, config, train_seconds)
    trainer.run(partial(keep, target, out))
    report |= {"steps": trainer.step, "seconds": round(time.monotonic() - began, 1)}
    (out / "report.json").write_text(json.dumps(report))
    typer.echo(json.dumps(report))


def keep(target: Target, out: Path, trainer: Trainer) -> str:
    """Writes the averaged layer of now to `out`."""
    layer = own_layer(target)
    layer.load_state_dict({**layer.state_dict(), **trainer.average})
    export_layer(layer, out / f"mtp-{trainer.step}.safetensors")
    return ""


if __name__ == "__main__":
    typer.run(main)
