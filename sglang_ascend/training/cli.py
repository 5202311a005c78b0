"""`sglang-ascend train …`: generate, train, evaluate and export an MTP layer for a MiMo target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Train the MTP layer of a MiMo/Qwen2 checkpoint on the model's own outputs (FastMTP).",
    no_args_is_help=True,
)

TargetOption = Annotated[
    Path, typer.Option("--target", help="Folder with the target's config.json and weights.")
]
DataOption = Annotated[Path, typer.Option("--data", help="Folder of the generated shards.")]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")]


@app.command()
def target(out: Annotated[Path, typer.Argument(help="Empty or new folder to write.")]) -> None:
    """Write SmolLM2-135M-Instruct, without an MTP layer, from the installed wheel."""
    from safetensors.torch import save_file

    from sglang_ascend.models import smollm2

    out.mkdir(parents=True, exist_ok=True)
    save_file(dict(smollm2.target_tensors()), out / "model.safetensors", metadata={"format": "pt"})
    smollm2.write_json(out / "config.json", smollm2.target_config())
    smollm2.save_tokenizer(out)


@app.command()
def generate(
    folder: TargetOption,
    data: DataOption,
    exclude: Annotated[
        Path, typer.Option(help="Evaluation prompts (JSON) that must never be generated on.")
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Stop after this many sampled tokens.")],
    seed: Annotated[int, typer.Option(help="One seed per process; names the shards.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Conversations decoded at once.")] = 96,
    threads: ThreadsOption = 1,
) -> None:
    """Let the target write user turns and replies; store tokens and hiddens. Resumable."""
    _use_threads(threads)
    from sglang_ascend.training.generate import GenerateConfig, generate_shards
    from sglang_ascend.training.outputs import read_prompts
    from sglang_ascend.training.prompts import prompt_key

    excluded = {prompt_key(row["prompt"]) for row in read_prompts(exclude)}
    generate_shards(folder, data, GenerateConfig(seed=seed, rows=rows), excluded, tokens)


@app.command()
def train(
    folder: TargetOption,
    data: DataOption,
    out: Annotated[Path, typer.Option("--out", help="Folder for checkpoint and log; resumed.")],
    max_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps in all.")] = 1000,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak rate of AdamW.")] = 2e-3,
    muon_rate: Annotated[
        float, typer.Option(min=0.0, help="Peak rate of the matrices by Muon; 0 means AdamW.")
    ] = 0.02,
    tokens_per_batch: Annotated[int, typer.Option(min=64, help="Padded tokens a batch.")] = 2048,
    num_steps: Annotated[int, typer.Option(min=1, max=15, help="Depth K of the recursion.")] = 3,
    hard_weight: Annotated[
        float, typer.Option(min=0.0, help="Weight of FastMTP's cross-entropy with the token.")
    ] = 0.0,
    soft_weight: Annotated[
        float, typer.Option(min=0.0, help="Weight of cross-entropy with the target's softmax.")
    ] = 1.0,
    hidden_weight: Annotated[
        float, typer.Option(min=0.0, help="Weight of smooth-L1 to the target's hidden.")
    ] = 1.0,
    seed: int = 0,
    threads: ThreadsOption = 1,
) -> None:
    """Train the layer; kill it and run the same command to go on."""
    _use_threads(threads)
    from sglang_ascend.training.loss import LossConfig
    from sglang_ascend.training.start import started_layer
    from sglang_ascend.training.trainer import TrainConfig, Trainer

    layer, embedding = started_layer(folder, data, out, seed)
    config = TrainConfig(
        max_steps=max_steps,
        learning_rate=learning_rate,
        muon_rate=muon_rate,
        tokens_per_batch=tokens_per_batch,
        seed=seed,
    )
    loss = LossConfig(
        num_steps=num_steps,
        hard_weight=hard_weight,
        soft_weight=soft_weight,
        hidden_weight=hidden_weight,
    )
    Trainer(layer, embedding, embedding, data, out, config, loss).run()  # a tied head


@app.command()
def evaluate(
    folder: TargetOption,
    layer: Annotated[
        Path, typer.Option("--layer", help="mtp.safetensors or a trainer's checkpoint.safetensors.")
    ],
    prompts: Annotated[Path, typer.Option(help="JSON list of {domain, prompt}.")],
    outputs: Annotated[
        Path, typer.Option(help="Cache file of the target's greedy outputs; made if missing.")
    ],
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Length of each reply.")] = 192,
    num_steps: Annotated[int, typer.Option(min=1, max=15, help="Drafts per verify.")] = 3,
    vocabulary: Annotated[
        Path | None, typer.Option(help="Folder whose draft_vocabulary.json restricts the drafts.")
    ] = None,
    threads: ThreadsOption = 1,
) -> None:
    """Print acceptance length per domain with lookup baseline and loop share, as JSON."""
    _use_threads(threads)
    from sglang_ascend.speculative.vocabulary import read_draft_vocabulary
    from sglang_ascend.training.acceptance import evaluate as measure
    from sglang_ascend.training.mtp_mimo import load_layer
    from sglang_ascend.training.outputs import (
        greedy_outputs,
        load_outputs,
        read_prompts,
        save_outputs,
    )

    if not outputs.exists():
        save_outputs(outputs, greedy_outputs(folder, read_prompts(prompts), max_new_tokens))
    trained, embedding = load_layer(folder, layer)
    draft_ids = read_draft_vocabulary(vocabulary, len(embedding)) if vocabulary else None
    replies = load_outputs(outputs)
    report = measure(trained, replies, embedding, embedding, num_steps, draft_ids)
    typer.echo(json.dumps(report, indent=2))


@app.command()
def vocabulary(
    folder: TargetOption,
    data: DataOption,
    out: Annotated[Path, typer.Option("--out", help="Folder that receives the file.")],
    size: Annotated[int, typer.Option(min=1, help="Number of tokens.")] = 16384,
) -> None:
    """Write draft_vocabulary.json: the tokens that drafts may propose (verification is whole)."""
    from transformers import AutoTokenizer

    from sglang_ascend.training.draft_vocabulary import frequent_ids, write_draft_vocabulary

    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = frequent_ids(data, tokenizer.all_special_ids, vocab_size, size)
    write_draft_vocabulary(out, ids)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A trainer's checkpoint.safetensors.")],
    out: Annotated[Path, typer.Argument(help="The file to write, such as mtp.safetensors.")],
) -> None:
    """Write the averaged weights in bf16 under SGLang's names."""
    from sglang_ascend.training.export import export as write
    from sglang_ascend.training.trainer import read_average

    write(read_average(checkpoint), out)


@app.command()
def provenance(
    work: Annotated[Path, typer.Argument(help="The recipe's work folder.")],
    out: Annotated[Path, typer.Argument(help="The file to write, such as provenance.json.")],
    note: Annotated[str, typer.Option(help="What this build did beside the recipe.")] = "",
) -> None:
    """Gather sources, versions, losses and acceptance of a recipe's run into one JSON file."""
    from sglang_ascend.models.smollm2 import write_json
    from sglang_ascend.training.smollm2_provenance import record

    write_json(out, record(work, note))


def _use_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


if __name__ == "__main__":
    app()
