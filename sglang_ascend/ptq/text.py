"""Text for calibration and evaluation: what the float model itself writes, or replies to a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.quantization.writers.saving import save_tensors
from sglang_ascend.training.generation.conversation import REPLY, USER
from sglang_ascend.training.generation.generator import GenerateConfig, Generator
from sglang_ascend.training.generation.outputs import greedy_replies
from sglang_ascend.training.generation.prompt_files import read_prompts
from sglang_ascend.training.targets.families import Target

ROWS = 24


@dataclass(frozen=True)
class Text:
    """One conversation: tokens int64 [n], of which the first `prompt_length` were given."""

    domain: str
    tokens: Tensor
    prompt_length: int


def own_text(target: Target, seed: int, count: int, own_prompt_share: float = 0.75) -> list[Text]:
    """`count` conversations that the model writes, greedy replies to user turns of its own or, for
    the other share, of the templates in `training`. The seed decides them.

    Raises:
        ValueError: it writes nothing but loops, or nothing new any more.
    """
    config = GenerateConfig(
        rows=min(ROWS, count),
        own_prompt_share=own_prompt_share,
        reply_temperatures=(0.0,),
        second_turn_share=0.0,
        seed=seed,
    )
    written = list(islice(Generator(target, config, excluded=set()).run(), count))
    if len(written) < count:
        raise ValueError(
            f"{target.folder} wrote {len(written)} of {count} conversations and then nothing new: "
            "ask for fewer texts, or give your own."
        )
    return [
        Text(
            "own prompts" if USER in row.roles else "templated prompts",
            torch.tensor(row.tokens),
            row.roles.index(REPLY),
        )
        for row in written
    ]


def replies_to(
    target: Target, prompts: list[Path], max_new_tokens: int, limit: int | None
) -> list[Text]:
    """The model's greedy replies to the prompts of JSON files, at most `limit` of each domain.

    Raises:
        ValueError: a file is no list of prompts.
    """
    from transformers import AutoTokenizer

    rows: dict[str, list[dict[str, str]]] = {}
    for row in (row for path in prompts for row in read_prompts(path)):
        rows.setdefault(row["domain"], []).append(row)
    chosen = [row for domain in rows.values() for row in domain[:limit]]
    tokenizer = AutoTokenizer.from_pretrained(target.folder)
    texts = []
    for start in range(0, len(chosen), ROWS):
        part = chosen[start : start + ROWS]
        replies = greedy_replies(target, tokenizer, part, max_new_tokens)
        texts += [
            Text(row["domain"], tokens, length)
            for row, (length, tokens, _) in zip(part, replies, strict=True)
        ]
    return texts


def write_texts(path: Path, texts: list[Text]) -> None:
    tensors = {
        "tokens": torch.cat([text.tokens for text in texts]),
        "lengths": torch.tensor([len(text.tokens) for text in texts]),
        "prompt_lengths": torch.tensor([text.prompt_length for text in texts]),
    }
    save_tensors(tensors, path, {"domains": json.dumps([text.domain for text in texts])})


def read_texts(path: Path) -> list[Text]:
    """What `write_texts` wrote.

    Raises:
        CheckpointError: the file was damaged since.
    """
    with opened(path) as file:
        domains = json.loads(file.metadata()["domains"])
        rows = file.get_tensor("tokens").split(file.get_tensor("lengths").tolist())
        prompt_lengths = file.get_tensor("prompt_lengths").tolist()
    return [Text(*text) for text in zip(domains, rows, prompt_lengths, strict=True)]


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file of tensors that a killed run left whole, which this one goes on from.

    Raises:
        CheckpointError: it was damaged since.
    """
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(
            f"{shown(path)} is damaged ({error}); delete it, and the same command makes it anew"
        ) from None
