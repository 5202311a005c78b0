"""`sglang-ascend train …`: from a checkpoint's own outputs to the checkpoint with an MTP layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sglang_ascend.files import alone_in
from sglang_ascend.refusals import refusals
from sglang_ascend.training.pipeline.options import OwnShareOption, PromptsOption, own_share_of

if TYPE_CHECKING:
    from sglang_ascend.training.targets.families import Target


class _Refusing(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        from safetensors import SafetensorError

        with refusals(SafetensorError):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Refusing,
    help="Train the MTP layer of a checkpoint on the model's own outputs (FastMTP): generate, "
    "train, evaluate, export. The same commands serve MiMo/Qwen2, Llama, DeepSeek-V3, "
    "GLM-4 MoE and GLM-4.7 Flash.",
    no_args_is_help=True,
)

TargetOption = Annotated[
    Path, typer.Option("--target", help="Checkpoint folder: config.json, weights, tokenizer.")
]
DataOption = Annotated[Path, typer.Option("--data", help="Folder of the generated shards.")]
RunOption = Annotated[Path, typer.Option("--run", help="The folder that `train` wrote.")]
RUNS_HELP = "The folder that `train` wrote; repeated, the mean of their weights is taken"
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")]
DeviceOption = Annotated[
    str, typer.Option("--device", help="auto (an accelerator where there is one), cpu, cuda, npu.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Of the products: float32 or bfloat16. Without it float32 on a CPU, else bfloat16.",
    ),
]


@app.command()
def generate(
    folder: TargetOption,
    data: DataOption,
    exclude: Annotated[
        list[Path],
        typer.Option(help="Evaluation prompts that must never be generated on; repeatable."),
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Stop after this many sampled tokens.")],
    seed: Annotated[int, typer.Option(help="One seed per process; names the shards.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Conversations decoded at once.")] = 96,
    shard: Annotated[int, typer.Option(min=1, help="Conversations in a shard.")] = 128,
    prompts: PromptsOption = None,
    own_share: OwnShareOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = 1,
) -> None:
    """Let the target write user turns and replies; store tokens and hiddens. Resumable."""
    use_threads(threads)
    from sglang_ascend.training.generation.generate import generate_shards
    from sglang_ascend.training.generation.generator import GenerateConfig
    from sglang_ascend.training.generation.prompt_files import keys_of, read_prompts
    from sglang_ascend.training.targets.device import dtype_of_products

    excluded = keys_of(exclude)
    own = [row["prompt"] for row in read_prompts(prompts)] if prompts else None
    target = _open(folder, device)
    config = GenerateConfig(
        seed=seed,
        rows=rows,
        sequences_per_shard=shard,
        own_prompt_share=own_share_of(own_share, prompts),
        dtype=dtype_of_products(dtype, target.device),
    )
    with alone_in(data, f"lock-{seed:03d}", "--seed"):
        for said in filter(None, generate_shards(target, data, config, excluded, tokens, own)):
            typer.echo(said, err=True)


@app.command()
def text(
    folder: TargetOption,
    data: DataOption,
    text: Annotated[
        list[str], typer.Option(help="File .txt or .jsonl, or a folder of them; repeatable.")
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")],
    max_length: Annotated[int, typer.Option(min=16, help="Tokens of a piece at most.")] = 320,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = 1,
) -> None:
    """Store others' text with the target's hiddens, one forward and no generation. Resumable."""
    use_threads(threads)
    import torch

    from sglang_ascend.training.generation.text import write_text_shards
    from sglang_ascend.training.targets.device import dtype_of_products
    from sglang_ascend.training.vocabulary.sources import parse_sources

    target, sources = _open(folder, device), parse_sources(text)
    products = getattr(torch, dtype_of_products(dtype, target.device))
    with alone_in(data, "lock-text", "--data"):
        write_text_shards(target, data, sources, max_length, tokens, products)


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
    decay_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Last share of the steps, as rates fall to 0.")
    ] = 0.3,
    average_decay: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Decay of the weights' moving average.")
    ] = 0.98,
    tokens_per_batch: Annotated[int, typer.Option(min=64, help="Padded tokens a batch.")] = 2048,
    num_steps: Annotated[int, typer.Option(min=1, max=15, help="Depth K of the recursion.")] = 3,
    kind: Annotated[
        str, typer.Option("--loss", help="Distance to the target: ce, kl, tv, lk or hybrid.")
    ] = "kl",
    hidden_weight: Annotated[
        float, typer.Option(min=0.0, help="Weight of smooth-L1 to the target's hidden.")
    ] = 1.0,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Leave the target's own MTP layer aside.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of batches and of a new layer.")] = 0,
    threads: ThreadsOption = 1,
) -> None:
    """Train the target's MTP layer, or a new one where it has none; run again to go on."""
    use_threads(threads)
    from sglang_ascend.training.loss import LossConfig
    from sglang_ascend.training.parallel import trainer_class
    from sglang_ascend.training.targets.device import dtype_of_products
    from sglang_ascend.training.targets.start import started_layer
    from sglang_ascend.training.trainer import TrainConfig

    loss = LossConfig(num_steps=num_steps, kind=kind, hidden_weight=hidden_weight)
    target = _open(folder, device)
    layer = started_layer(target, data, out, seed, from_scratch)
    config = TrainConfig(
        max_steps=max_steps,
        learning_rate=learning_rate,
        muon_rate=muon_rate,
        decay_share=decay_share,
        average_decay=average_decay,
        tokens_per_batch=tokens_per_batch,
        seed=seed,
        dtype=dtype_of_products(dtype, target.device),
    )
    with trainer_class(out) as trainer:
        trainer(layer, *target.embedding_and_head(), data, out, config, loss).run()


@app.command()
def evaluate(
    folder: TargetOption,
    prompts: Annotated[Path, typer.Option(help="JSON list of {domain, prompt}.")],
    outputs: Annotated[
        Path,
        typer.Option(help="File for the replies of this target, --prompts and --max-new-tokens."),
    ],
    runs: Annotated[
        list[Path] | None,
        typer.Option("--run", help=f"{RUNS_HELP}. Without it the target's own layer."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Length of each reply.")] = 192,
    num_steps: Annotated[int, typer.Option(min=1, max=15, help="Drafts per verify.")] = 3,
    vocabulary: Annotated[
        Path | None, typer.Option(help="Folder whose draft_vocabulary.json restricts the drafts.")
    ] = None,
    context: Annotated[
        bool, typer.Option(help="Drafts may be tokens of their own text too, as a CPU's are.")
    ] = True,
    device: DeviceOption = "auto",
    threads: ThreadsOption = 1,
) -> None:
    """Print acceptance length per domain with lookup baseline and loop share, as JSON.

    Replies are written once, by a quantized target as it is served, and read from --outputs then.
    """
    use_threads(threads)
    from sglang_ascend.training.acceptance import evaluate as measure
    from sglang_ascend.training.generation import outputs as replies
    from sglang_ascend.training.generation.prompt_files import read_prompts
    from sglang_ascend.training.targets.start import own_layer, trained_layer
    from sglang_ascend.training.vocabulary.draft_list import listed_in

    target = _open(folder, device, may_be_quantized=True)
    layer = trained_layer(target, *runs) if runs else own_layer(target)
    texts = replies.kept_outputs(outputs, target, read_prompts(prompts), max_new_tokens)
    embedding, head = target.embedding_and_head()
    draft_ids = listed_in(vocabulary, len(head)) if vocabulary else None
    report = measure(layer, texts, embedding, head, num_steps, draft_ids, context)
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

    from sglang_ascend.checkpoint.config import read_config
    from sglang_ascend.training.vocabulary.draft_list import frequent_ids, write_draft_vocabulary

    vocab_size = read_config(folder).size("vocab_size")
    special_ids = AutoTokenizer.from_pretrained(folder).all_special_ids
    ids = frequent_ids(data, special_ids, vocab_size, size)
    write_draft_vocabulary(out, ids)


@app.command()
def export(
    folder: TargetOption,
    runs: Annotated[list[Path], typer.Option("--run", help=f"{RUNS_HELP}.")],
    out: Annotated[
        Path,
        typer.Argument(help="New folder to serve, or a .safetensors file for the layer alone."),
    ],
) -> None:
    """Join target and trained layer into a folder for `--model-path`, and check it."""
    from sglang_ascend.training.export import export, export_layer
    from sglang_ascend.training.targets.families import Target
    from sglang_ascend.training.targets.start import trained_layer

    target = Target.open(folder)
    layer = trained_layer(target, *runs)
    if out.suffix == ".safetensors":
        export_layer(layer, out)
    else:
        export(target, layer, out)


@app.command()
def provenance(
    data: DataOption,
    run: RunOption,
    out: Annotated[Path, typer.Argument(help="The file to write, such as provenance.json.")],
    facts: Annotated[
        Path | None, typer.Option(help="JSON object to begin with: model, licence, sources.")
    ] = None,
    add: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE.json to put under NAME; repeatable.")
    ] = None,
    note: Annotated[str, typer.Option(help="What this build did beside its recipe.")] = "",
) -> None:
    """Write where a layer comes from: data, settings, losses, versions, commit and what you add."""
    from sglang_ascend.files import write_json
    from sglang_ascend.training.provenance import read_facts, record

    begin, added = read_facts(facts, add or [])
    write_json(out, {**begin, "note": note, **record(data, run), **added})


def _open(folder: Path, device: str, may_be_quantized: bool = False) -> Target:
    from sglang_ascend.training.targets.device import compute_device
    from sglang_ascend.training.targets.families import Target

    target = Target.open(folder, may_be_quantized, compute_device(device))
    target.check_whole()
    return target


def use_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


if __name__ == "__main__":
    app()
