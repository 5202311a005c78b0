"""Shards of self-generated conversations as padded batches, in an order fixed by seed and pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_ascend.training.generation.conversation import FORCED
from sglang_ascend.training.generation.shards import read_shard

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sequence:
    """One conversation: tokens int64 [n], trained bool [n], hidden bf16 [n, hidden_size]."""

    tokens: Tensor
    trained: Tensor
    hidden: Tensor


def shard_paths(data: Path) -> list[Path]:
    """The shards of a folder, by name.

    Raises:
        FileNotFoundError: there is none.
    """
    paths = sorted(data.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{data} holds no shard: run `generate` first.")
    return paths


def load_shards(paths: list[Path], hidden_size: int | None = None) -> list[Sequence]:
    """All conversations of `paths`; `trained` marks the tokens that the model itself wrote.

    Raises:
        ValueError: hidden states are of another target, whose have not `hidden_size` values.
    """
    sequences = []
    for path in paths:
        shard = read_shard(path)
        if hidden_size and shard["hidden"].shape[1] != hidden_size:
            raise ValueError(
                f"{path} holds hidden states of {shard['hidden'].shape[1]} values and not of "
                f"{hidden_size}: another target wrote it, so name another --data."
            )
        lengths = shard["lengths"].tolist()
        parts = zip(
            shard["tokens"].long().split(lengths),
            (shard["roles"] != FORCED).split(lengths),
            shard["hidden"].split(lengths),
            strict=True,
        )
        sequences += [Sequence(*part) for part in parts]
    return sequences


def frequent_tokens(sequences: list[Sequence], count: int, vocab_size: int) -> Tensor:
    """Sorted int64 ids of the `count` most frequent tokens."""
    tokens = torch.cat([sequence.tokens for sequence in sequences])
    return most_frequent(torch.bincount(tokens, minlength=vocab_size), count)


def most_frequent(totals: Tensor, count: int) -> Tensor:
    """Sorted int64 ids of the `count` largest of `totals` [vocabulary]."""
    return totals.topk(min(count, len(totals))).indices.sort().values


def pass_order(lengths: list[int], tokens_per_batch: int, seed: int) -> list[list[int]]:
    """Batches of indices of sequences for one pass: similar lengths together, batches shuffled."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(len(lengths), generator=generator) * 24
    batches: list[list[int]] = [[]]
    longest = 0
    for index in (torch.tensor(lengths) + noise).argsort().tolist():
        longest = max(longest, lengths[index])
        if batches[-1] and longest * (len(batches[-1]) + 1) > tokens_per_batch:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    order = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in order]


def drafted_batches(
    sequences: list[Sequence], tokens_per_batch: int, seed: int, min_position: int
) -> list[list[int]]:
    """`pass_order` without the batches that have none of `trained_rows`, as short texts can fill:
    a step would teach nothing, and its loss, the mean of no row, be NaN in log and provenance.

    Raises:
        ValueError: no sequence has such a row.
    """
    drafted = [bool(one.trained[min_position + 1 :].any()) for one in sequences]
    if not any(drafted):
        raise ValueError(
            f"no conversation or text has a token to train on behind its first {min_position + 1}: "
            "generate longer ones, or train fewer drafts by --num-steps."
        )
    lengths = [len(sequence.tokens) for sequence in sequences]
    batches = pass_order(lengths, tokens_per_batch, seed)
    return [batch for batch in batches if any(drafted[index] for index in batch)]


def collate(
    sequences: list[Sequence],
    min_position: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor, tuple]:
    """Right-padded (tokens, hidden in `dtype`, rows) on `device`; rows are `trained_rows`."""
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([sequence.tokens for sequence in sequences], batch_first=True)
    hidden = pad([sequence.hidden for sequence in sequences], batch_first=True)
    trained = pad([sequence.trained for sequence in sequences], batch_first=True)
    sequence, position = (index.to(device) for index in trained_rows(trained, min_position))
    return tokens.to(device), hidden.to(device).to(dtype), (sequence, position)


def trained_rows(trained: Tensor, min_position: int) -> tuple[Tensor, Tensor]:
    """Sequence and position of every token from `min_position` on whose next one is trained, as
    `loss.chain_loss` takes them; `trained` is bool [batch, length]."""
    sequence, following = trained[:, min_position + 1 :].nonzero(as_tuple=True)
    return sequence, following + min_position
