"""Shards: finished conversations with the target's hiddens, as safetensors files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from sglang_ascend.training.generation.conversation import FORCED, Conversation


class ShardError(ValueError):
    """A shard cannot be read; the message is one sentence that names it and the remedy."""


def write_shard(path: Path, conversations: Sequence[Conversation]) -> int:
    """Writes conversations as one safetensors shard; returns its number of sampled tokens.

    tokens int32 [n], roles uint8 [n], hidden bf16 [n, hidden_size] (target's hidden after its
    final norm; a finished conversation's last token was never fed: its row is zero), lengths
    int32 [conversations].
    """
    tokens, roles, hidden = [], [], []
    for row in conversations:
        tokens += row.tokens
        roles += row.roles
        hidden.append(with_last_hidden(row.hidden, len(row.tokens)))
    tensors = {
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "roles": torch.tensor(roles, dtype=torch.uint8),
        "hidden": torch.cat(hidden),
        "lengths": torch.tensor([len(row.tokens) for row in conversations], dtype=torch.int32),
    }
    prompts = [row.prompt for row in conversations]
    temperatures = [row.temperature for row in conversations]
    metadata = {"prompts": json.dumps(prompts), "temperatures": json.dumps(temperatures)}
    temporary = path.with_suffix(".part")
    save_file(tensors, temporary, metadata=metadata)
    temporary.rename(path)
    return sum(role != FORCED for role in roles)


def with_last_hidden(states: list[torch.Tensor], length: int) -> torch.Tensor:
    """[length, hidden_size]; a last token that was never fed gets a row of zeros."""
    missing = [torch.zeros_like(states[0])] * (length - len(states))
    return torch.stack(states[:length] + missing)


def read_shard(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a shard.

    Raises:
        ShardError: it is none, or not a whole one.
    """
    try:
        tensors = load_file(path)
        lengths = tensors["lengths"].tolist()
        if not sum(lengths) == len(tensors["tokens"]) == len(tensors["roles"]):
            raise KeyError("lengths")
        if len(tensors["hidden"]) != len(tensors["tokens"]):
            raise KeyError("hidden")
    except (SafetensorError, KeyError) as error:
        raise ShardError(
            f"{path} is no whole shard ({error}): delete it and run the same command again, which "
            "makes another in its place."
        ) from None
    return tensors


def read_prompt_list(path: Path) -> list[str]:
    """The user turns (the first of each conversation) of a shard."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["prompts"])
