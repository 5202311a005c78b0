"""Shards: finished conversations with the target's hiddens, as safetensors files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from sglang_ascend.files import replaced
from sglang_ascend.quantization.writers.saving import save_tensors
from sglang_ascend.training.generation.conversation import FORCED, TEXT, Conversation

TARGET = "target"  # metadata: the fingerprint of the target that wrote a shard


class ShardError(ValueError):
    """A shard cannot be read; the message is one sentence that names it and the remedy."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(
            f"{path} is no whole shard ({reason}): delete it and run the same command again, which "
            "makes another in its place."
        )


def write_shard(
    path: Path, conversations: Sequence[Conversation], target: str | None = None
) -> int:
    """Writes conversations as one safetensors shard; returns its number of sampled tokens.

    `target` is the fingerprint of what wrote them, where it is known.

    tokens int32 [n], roles uint8 [n], hidden bf16 [n, hidden_size] (target's hidden after its
    final norm; a finished conversation's last token was never fed: its row is zero), lengths
    int32 [conversations].
    """
    prompts = [row.prompt for row in conversations]
    temperatures = [row.temperature for row in conversations]
    metadata = {"prompts": json.dumps(prompts), "temperatures": json.dumps(temperatures)}
    if target is not None:
        metadata[TARGET] = target
    rows = [
        (row.tokens, row.roles, with_last_hidden(row.hidden, len(row.tokens)))
        for row in conversations
    ]
    return _write(path, rows, metadata)


def write_documents(
    path: Path, documents: Sequence[tuple[list[int], int, torch.Tensor]], metadata: dict[str, str]
) -> int:
    """Writes documents as `write_shard` does; returns their number of trained tokens.

    Each is its tokens, how many of the first ones the tokenizer put there, and bf16 hiddens.
    """
    rows = [
        (tokens, [FORCED] * forced + [TEXT] * (len(tokens) - forced), hidden)
        for tokens, forced, hidden in documents
    ]
    return _write(path, rows, {"prompts": "[]", "temperatures": "[]", **metadata})


def _write(
    path: Path, rows: list[tuple[list[int], list[int], torch.Tensor]], metadata: dict[str, str]
) -> int:
    roles = torch.tensor([role for _, row, _ in rows for role in row], dtype=torch.uint8)
    tensors = {
        "tokens": torch.tensor([t for row, _, _ in rows for t in row], dtype=torch.int32),
        "roles": roles,
        "hidden": torch.cat([hidden for _, _, hidden in rows]),
        "lengths": torch.tensor([len(row) for row, _, _ in rows], dtype=torch.int32),
    }
    with replaced(path) as part:
        save_tensors(tensors, part, metadata)
    return int((roles != FORCED).sum())


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
        raise ShardError(path, error) from None
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """What a shard says of itself.

    Raises:
        ShardError: it is none.
    """
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise ShardError(path, error) from None


def read_prompt_list(path: Path) -> list[str]:
    """The user turns (the first of each conversation) of a shard."""
    return json.loads(read_metadata(path)["prompts"])
