"""The prompts of a run on a card, as tokens: the card's machine needs no tokenizer for them."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from transformers import AutoTokenizer

from sglang_ascend.training.generation.prompt_files import keys_of, read_prompts
from sglang_ascend.training.generation.prompts import (
    prompt_key,
    templated_prompts,
    vocabulary_words,
)

LONGEST = 128  # tokens


def main(
    target: Annotated[Path, typer.Option(help="Checkpoint folder, for its tokenizer.")],
    requests: Annotated[list[Path], typer.Option(help="JSON list of prompts; repeatable.")],
    exclude: Annotated[list[Path], typer.Option(help="Evaluation prompts; repeatable.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    templated: Annotated[int, typer.Option(min=0, help="Templated prompts beside them.")] = 120_000,
    seed: Annotated[int, typer.Option(help="Of the templates and of the order.")] = 0,
) -> None:
    """Write distinct prompts in a drawn order, none that is held out."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    excluded = keys_of(exclude)
    asked = [row["prompt"] for path in requests for row in read_prompts(path)]
    made = templated_prompts(seed, set(excluded), vocabulary_words(tokenizer))
    distinct: dict[str, str] = {}
    for prompt in [*asked, *islice(made, templated)]:
        if prompt_key(prompt) not in excluded:
            distinct.setdefault(prompt_key(prompt), prompt)
    prompts = list(distinct.values())
    random.Random(seed).shuffle(prompts)
    rows = [
        row for row in tokenizer(prompts, add_special_tokens=False).input_ids if len(row) <= LONGEST
    ]
    tensors = {
        "tokens": torch.tensor([token for row in rows for token in row]).to(torch.uint16),
        "lengths": torch.tensor([len(row) for row in rows], dtype=torch.uint8),
    }
    save_file(tensors, out)
    typer.echo(f"{len(rows)} prompts")


if __name__ == "__main__":
    typer.run(main)
