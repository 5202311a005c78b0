"""What `train-mtp` and `train-draft` can be asked, in the words of their help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

# Panels of the help.
DATA, LAYER, RESULT = "What the layer learns from", "How it is trained", "What is written"

TargetArgument = Annotated[
    Path,
    typer.Argument(
        help="Checkpoint folder of a Llama, Qwen2, MiMo, DeepSeek-V3, GLM-4 MoE or GLM-4.7 Flash: "
        "config.json, safetensors, tokenizer. With an MTP layer to go on from, or without one."
    ),
]
OutOption = Annotated[
    Path,
    typer.Option(help="Work folder; OUT/model is what is served.", rich_help_panel=RESULT),
]
TokensOption = Annotated[
    int,
    typer.Option(min=1, help="Tokens that the target writes to learn from.", rich_help_panel=DATA),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help="Your prompts, JSON or JSON lines: strings, {prompt} or {messages}. The closer to "
        "what your server is asked, the better. Without it: this package's templates.",
        rich_help_panel=DATA,
    ),
]
TextOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Text beside the replies, .txt or .jsonl, repeatable: one forward over it, nothing is "
        "generated, the target's distribution is what is learned. As `build-vocabulary --text`.",
        rich_help_panel=DATA,
    ),
]
TextTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens of --text. Without it: as many as --tokens.", rich_help_panel=DATA
    ),
]
HeldOutOption = Annotated[
    Path | None,
    typer.Option(
        help="Prompts that are only measured on, as --prompts. Without it: every 20th of "
        "--prompts (40 at most), or those of `sglang-ascend bench`.",
        rich_help_panel=DATA,
    ),
]
OwnShareOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Share of conversations whose user turn the target writes too. Without it: 0.6, "
        "with --prompts 0.",
        rich_help_panel=DATA,
    ),
]

TemperatureMixOption = Annotated[
    str,
    typer.Option(
        help="A reply's temperature is drawn from these; 0 is greedy.", rich_help_panel=DATA
    ),
]
MaxLengthOption = Annotated[
    int,
    typer.Option(
        min=64,
        help="Tokens of a conversation; longer prompts are left out.",
        rich_help_panel=DATA,
    ),
]
MaxNewTokensOption = Annotated[
    int, typer.Option(min=8, help="Tokens of a reply.", rich_help_panel=DATA)
]
InitOption = Annotated[
    bool,
    typer.Option(
        "--init",
        help="Begin with a new layer although the target has one. A target without one always "
        "gets a new one.",
        rich_help_panel=LAYER,
    ),
]
MaxStepsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Optimizer steps. Without it: five times over the tokens. More of them later "
        "prolong a finished training.",
        rich_help_panel=LAYER,
    ),
]
LossOption = Annotated[
    str,
    typer.Option(
        help="Distance of a draft to the target: ce, kl, tv, lk or hybrid.",
        rich_help_panel=LAYER,
    ),
]
NumStepsOption = Annotated[
    int,
    typer.Option(
        min=1, max=15, help="Drafts K that the layer is trained for.", rich_help_panel=LAYER
    ),
]
OnPolicyRoundsOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Further rounds, each of a quarter as many steps, in which drafts count that a server "
        "would verify: those whose chain was accepted so far.",
        rich_help_panel=LAYER,
    ),
]
ReplayOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="How much a rejected draft counts in such a round, an accepted one being 1.",
        rich_help_panel=LAYER,
    ),
]
LearningRateOption = Annotated[
    float, typer.Option(min=0.0, help="Peak rate of AdamW.", rich_help_panel=LAYER)
]
MuonRateOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Peak rate of the matrices by Muon; 0 gives them to AdamW.",
        rich_help_panel=LAYER,
    ),
]
TokensPerBatchOption = Annotated[
    int, typer.Option(min=64, help="Padded tokens of a batch.", rich_help_panel=LAYER)
]
VocabularyOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Tokens that drafts may propose, the most frequent ones; 0 allows all. "
        "Verification always has the full vocabulary.",
        rich_help_panel=RESULT,
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Of the products: float32, whose killed training ends in the same weights bit by bit, "
        "or bfloat16 where that is fast. Without it: float32 on a CPU, else bfloat16.",
        rich_help_panel=LAYER,
    ),
]
SeedOption = Annotated[
    int, typer.Option(help="Of replies, batches and a new layer.", rich_help_panel=LAYER)
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="Where target and layer compute: auto (an accelerator where there is one), cpu, cuda "
        "or npu. A killed command may go on on another, with the same --dtype.",
    ),
]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]


def own_share_of(own_share: float | None, prompts: Path | None) -> float:
    """What `OwnShareOption` says that it is."""
    if own_share is None:
        return 0.0 if prompts else 0.6
    return own_share


@dataclass(frozen=True)
class SharedOptions:
    """What was asked for, whatever is trained on a target's replies."""

    tokens: int = 500_000
    max_steps: int | None = None
    prompts: Path | None = None
    held_out: Path | None = None
    text: tuple[str, ...] = ()
    text_tokens: int = 0
    temperature_mix: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 1.0)
    own_share: float = 0.6
    max_length: int = 320
    max_new_tokens: int = 192
    loss: str = "kl"
    num_steps: int = 3
    learning_rate: float = 2e-3
    muon_rate: float = 0.02
    tokens_per_batch: int = 2048
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class Options(SharedOptions):
    """Of an MTP layer."""

    init: bool = False
    on_policy_rounds: int = 0
    replay: float = 2.0
    vocabulary: int = 16384
