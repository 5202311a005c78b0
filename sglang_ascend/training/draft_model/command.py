"""`sglang-ascend train-draft`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_ascend.refusals import refusals
from sglang_ascend.training.pipeline import options as asked
from sglang_ascend.training.pipeline.command import NOT_OPTIONS, full_disk, run, settle, tell

if TYPE_CHECKING:
    from sglang_ascend.training.pipeline.replies import RepliesPipeline

TargetArgument = Annotated[
    Path,
    typer.Argument(
        help="Checkpoint folder of the model that is drafted for, of a family that `train-mtp` "
        "takes: config.json, safetensors, tokenizer.json."
    ),
]
DraftOption = Annotated[
    Path | None,
    typer.Option(
        help="A small Llama, Qwen2 or Qwen3 of the target's tokenizer to go on from.",
        rich_help_panel=asked.LAYER,
    ),
]
InitLayersOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Begin with this many of the target's own layers, evenly spaced, and its embedding "
        "and head. Of a Llama, Qwen2 or MiMo.",
        rich_help_panel=asked.LAYER,
    ),
]
MeasuredStepsOption = Annotated[
    int,
    typer.Option(
        min=1, max=15, help="Drafts K that acceptance is measured for.", rich_help_panel=asked.LAYER
    ),
]


def train_draft(
    target: TargetArgument,
    out: asked.OutOption,
    draft: DraftOption = None,
    init_layers: InitLayersOption = None,
    tokens: asked.TokensOption = 500_000,
    prompts: asked.PromptsOption = None,
    held_out: asked.HeldOutOption = None,
    text: asked.TextOption = None,
    text_tokens: asked.TextTokensOption = None,
    own_share: asked.OwnShareOption = None,
    temperature_mix: asked.TemperatureMixOption = "0,0,0,0,1",
    max_length: asked.MaxLengthOption = 320,
    max_new_tokens: asked.MaxNewTokensOption = 192,
    max_steps: asked.MaxStepsOption = None,
    loss: asked.LossOption = "kl",
    num_steps: MeasuredStepsOption = 3,
    learning_rate: asked.LearningRateOption = 5e-4,
    muon_rate: asked.MuonRateOption = 0.0,
    tokens_per_batch: asked.TokensPerBatchOption = 2048,
    dtype: asked.DtypeOption = None,
    seed: asked.SeedOption = 0,
    device: asked.DeviceOption = "auto",
    threads: asked.ThreadsOption = None,
) -> None:
    """Distil a separate small model from a target, to draft for it.

    The target writes replies; the small model learns the target's distribution behind each token of
    them, and is measured on prompts that it never saw; it is written to OUT/model, with plots and
    provenance beside it. Its layers and last norm are trained; embedding and head stay as they are.

    Run the same command again after a kill: finished stages are kept, the others go on, as with
    `train-mtp`.

    Example: `sglang-ascend train-draft my-llama --init-layers 6 --out my-draft --tokens 500000`
    """
    options = {name: value for name, value in locals().items() if name not in NOT_OPTIONS}
    with refusals(RuntimeError), full_disk(out):
        settle(options)
        report = run(out, options, threads, lambda say: _pipeline(target, out, options, say))
    served = f"python -m sglang.launch_server --model-path {quote(str(target))} "
    served += "--speculative-algorithm STANDALONE --speculative-draft-model-path "
    tell(report, served + quote(str(out / "model")))
    typer.echo(out / "model")


def _pipeline(
    target: Path, out: Path, options: dict[str, Any], say: Callable[[str], object]
) -> RepliesPipeline:
    from sglang_ascend.training.draft_model.pipeline import DraftOptions, DraftPipeline

    return DraftPipeline(target, out, DraftOptions(**options), say)
