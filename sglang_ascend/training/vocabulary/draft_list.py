"""The draft vocabulary of a trained layer: the tokens that its training data uses most."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sglang_ascend.files import replaced
from sglang_ascend.speculative.vocabulary.file import FILE_NAME, read_draft_vocabulary
from sglang_ascend.training.data import shard_paths
from sglang_ascend.training.generation.conversation import TEXT
from sglang_ascend.training.generation.shards import read_shard
from sglang_ascend.training.vocabulary.rankings import ranking


def frequent_ids(data: Path, special_ids: list[int], vocab_size: int, size: int) -> list[int]:
    """`size` ascending ids: the special ones, then the most frequent tokens of the conversations in
    `data`, not of others' text, then low ids, which a byte-pair tokenizer gives to its most
    frequent tokens.

    Raises:
        FileNotFoundError: no shard in `data`.
        ValueError: one of another vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for path in shard_paths(data):
        shard = read_shard(path)
        if (shard["tokens"] >= vocab_size).any():
            raise ValueError(
                f"{path} has tokens beyond the {vocab_size} of this vocabulary: another target "
                "wrote it, so name another --data."
            )
        if not (shard["roles"] == TEXT).any():
            counts += torch.bincount(shard["tokens"].long(), minlength=vocab_size)
    return listed_ids(counts, special_ids, size)


def listed_ids(counts: torch.Tensor, special_ids: list[int], size: int) -> list[int]:
    """`size` ascending ids by how often each of the vocabulary occurs, as `frequent_ids` says."""
    # A tokenizer may have tokens that its model has no row for.
    special = {i for i in special_ids if i < len(counts)}
    others = [i for i in ranking(counts.numpy(force=True)).tolist() if i not in special]
    return sorted([*special, *others][:size])


def listed_in(folder: Path, vocab_size: int) -> torch.Tensor:
    """int64 ids, ascending, of the list that lies in `folder`.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    ids = read_draft_vocabulary(folder, vocab_size)
    if ids is None:
        raise ValueError(f"{folder} has no {FILE_NAME}: name the folder that holds one.")
    return ids


def write_draft_vocabulary(folder: Path, token_ids: list[int]) -> None:
    """Writes the file that `speculative.vocabulary.file.read_draft_vocabulary` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    with replaced(folder / FILE_NAME) as part:
        part.write_text(json.dumps({"token_ids": token_ids}) + "\n")
